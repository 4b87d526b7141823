"""Common parts of prefill and decode workers: the process, the shell around a pure state, the servicer, the KV pool.

Decides nothing about requests; `prefill_worker.state` and `decode_worker.state` do.
"""
