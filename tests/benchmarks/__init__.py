"""Each benchmark runs from end to end at a tiny size. What it measures there is no claim."""
