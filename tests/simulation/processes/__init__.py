"""Processes of a simulated cluster, assembled as by their entry points, over simulated network, memory, model and time.

States, services, servicers, clients and membership are the product's own. Each process runs in one `Life`; `validate`
runs after events of its state.
"""
