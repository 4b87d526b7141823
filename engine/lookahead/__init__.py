"""Who gets which blocks of a pool, and how many ahead of need. Pure; imports neither torch nor a worker.

`Allocator` is the mechanism over one `BlockSpace`; what it decides is a policy's: `OnDemand`, `WorstCase`, `Lookahead`.
"""
