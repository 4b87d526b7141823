"""How the cluster is started and spoken to: the command line, the launcher of a cluster on one machine.

The only package that knows all the others. Holds no policy of its own about requests or KV.
"""
