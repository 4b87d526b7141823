"""`moonserve traces analyze`: lengths, arrivals, shared prefixes, sessions and hit ratio by cache size.

The measures are pure functions of records. Only `command` reads and writes files.
"""
