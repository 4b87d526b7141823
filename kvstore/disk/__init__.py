"""The SSD tier: append-only segment files, found again after a crash. `base` says what the rest of a node sees."""
