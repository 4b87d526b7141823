"""The prefill phase: queue → prefix load → chunked prefill → per-layer streaming → handoff.

`state` decides and never acts; `service` acts and never decides. Knows nothing about the conductor's policies, about
HTTP, or about what a decode worker does with a sequence after the handoff.
"""
