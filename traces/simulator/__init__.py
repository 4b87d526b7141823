"""A cluster in virtual time: the conductor's own state machine over modelled instances, network and memory.

`spec` describes the cluster, `profiles` the speed of its machines, and `results` the results. `run` runs a simulation,
`command` is the command line.
"""
