"""The cluster's processes, put together as their own entry points do, over simulated network, memory, model and time.

Everything that decides or awaits is the product's: states, services, servicers, clients, membership. Each process is
one `Life`; `validate` runs after every event of its state.
"""
