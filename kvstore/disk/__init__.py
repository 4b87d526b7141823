"""SSD tier of a store node: a log of segment files with group commit, compaction and recovery. Interface: `base`;
entry: `tier`."""
