"""`make bench-store`: the store beside other stores and the machine's limits, its restart, and how its cost grows."""
