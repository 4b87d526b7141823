"""`moonserve doctor`: one module per subject of examination. Each module returns findings.

Only `command` prints. Nothing here changes the machine.
"""
