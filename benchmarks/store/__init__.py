"""`make bench-store`: compares the store with other stores and the machine's limits; measures restart and growth."""
