"""`make bench-transfer`: compares the transfer engine with the machine's limits and other engines, in one run.

`python -m benchmarks.transfer` prints the table, `python -m benchmarks.transfer.scaling` measures scaling. Each
contestant consists of two processes (`side`), controlled by the driver (`pair`, `rounds`).
"""
