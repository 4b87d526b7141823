"""`moonserve traces synthesize`: traces of any length, from options, a preset, or in the likeness of a given one.

Requests are generated one by one from a bounded memory, so that only the disk limits a trace's length. Equal seeds and
options give equal traces.
"""
