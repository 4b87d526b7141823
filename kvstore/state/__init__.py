"""State machine of a node: what it holds, who may read and write it, what is evicted, what moves between memory and
disk. Pure: no I/O, no clock; `kvstore.node` is its shell."""
