"""Pipeline groups: several processes, each with a share of the layers, that prefill every prompt together.

Chunked pipeline parallelism (Mooncake, FAST'25 §4.2): while a chunk of a prompt is at one stage, the next chunk is at
the stage before it. So a long prompt's TTFT is little more than its computing time divided by the number of stages. The
*leader* is stage 0 and the prefill worker that the cluster knows; the *followers* run the leader's plans. Each stage
keeps the KV of its own layers and sends it to decode workers itself.
"""
