"""`make bench-transfer`: the transfer engine beside the machine's limits and other engines, in one run.

`python -m benchmarks.transfer` is the table, `python -m benchmarks.transfer.scaling` the scaling. Each
contestant is two processes of its own (`side`), told what to do by the driver (`pair`, `rounds`).
"""
