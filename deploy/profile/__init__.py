"""`moonserve profile`: measures a model on this machine, alone or, with `--serving`, in a cluster of processes.

`command` measures steps and rates. `serving` starts a cluster, which `probe` observes from outside. `bursts` and
`terms` derive coefficients from the observations; `serving.calibrated` finds the last one.
"""
