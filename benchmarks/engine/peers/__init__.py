"""Other engines beside ours, each in its own process and, but for transformers, in an environment of its own."""
