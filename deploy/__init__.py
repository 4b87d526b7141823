"""Starts and operates the cluster: the command line, and the launcher of a cluster on one machine.

The only package that imports all the others. Holds no policy of its own about requests or KV.
"""
