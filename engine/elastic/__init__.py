"""Elastic KV memory: pages are populated and given back on demand, within a budget of all workers of a host (after
kvcached).

paged_blanks.py chooses blocks and pages, ledger.py divides the budget, elasticity.py populates and discards memory.
"""
