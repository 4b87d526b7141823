"""`moonserve traces synthesize`: traces of any length, described, by a preset, or like another.

Everything yields requests one by one and remembers a bounded past, so a trace may be as long as the disk has room.
Equal seeds and options give equal traces.
"""
