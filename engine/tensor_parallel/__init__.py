"""Tensor parallelism: the ranks of one worker share every layer's heads and MLP (Megatron-LM, arXiv:1909.08053 §3).

Each rank is a process with its share of the weights. All of them map the worker's one KV pool, and each writes the KV
heads that it has, so that what a block's bytes are does not depend on how many ranks made them. Rank 0 is the worker
that the cluster knows: it schedules, transfers and samples, and tells the others what to compute, step by step.
"""
