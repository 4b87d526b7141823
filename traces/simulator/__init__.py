"""A cluster in virtual time: the conductor's own state machine over modelled instances, network and memory.

`spec` says what is simulated, `profiles` how fast its machines are, `results` what came of it; `run` runs it,
`command` is the verb.
"""
