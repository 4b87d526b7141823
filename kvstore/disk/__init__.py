"""The SSD tier of a store node: append-only segment files, recovered after a crash. `base` is its interface."""
