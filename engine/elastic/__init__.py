"""KV memory that comes and goes by pages, shared by a host's workers (after kvcached).

What is free and which page goes next: paged_blanks.py; who may take how much: ledger.py; the machine's memory:
elasticity.py.
"""
