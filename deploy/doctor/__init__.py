"""`moonserve doctor`: one module per thing that is looked at, each of which returns findings.

Only `command` prints, and nothing here changes the machine.
"""
