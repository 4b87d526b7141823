"""`moonserve traces analyze`: lengths, arrivals, shared prefixes, hits against capacity and sessions of a trace.

Pure measures over records; `command` is the only file that reads and writes files.
"""
