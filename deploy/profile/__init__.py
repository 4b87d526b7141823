"""`moonserve profile`: how fast a model is on this machine, alone or, with `--serving`, in a cluster of processes.

`command` measures steps and rates; `serving` starts a cluster that `probe` observes from outside as `runs`, of which
`bursts` and `terms` make coefficients and `calibration` the last of them.
"""
