"""Registered memory: segments (segments.py, memfd.py), the right to write them (write_windows.py), scatter lists and
the C code that moves them (data_plane.py, ../native/)."""
