"""A prefill group: several workers with a share of the layers each, which prefill every prompt together.

Chunked pipeline parallelism (Mooncake, FAST'25 §4.2): while a chunk of a prompt is at one stage, the next chunk is at
the stage before it, so that a long prompt's first token comes after little more than its computing time divided by the
number of stages. The *leader* is stage 0 and the prefill worker that the cluster knows; the *followers* do as it says.
Each stage keeps the KV of its own layers and sends it to decode workers itself.
"""
