"""Tensor parallelism: the ranks of one worker share every layer's heads and MLP (Megatron-LM, arXiv:1909.08053 §3).

Each rank is a process with its share of the weights. All ranks map the worker's one KV pool and each writes its own KV
heads, so a block's bytes do not depend on the number of ranks. Rank 0 is the worker that the cluster knows: it
schedules, transfers and samples, and sends each step to the other ranks.
"""
