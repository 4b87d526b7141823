"""Traces of real traffic: their format, prompts built from them, replay against an endpoint, and reports.

Uses an endpoint's HTTP interface as any client does, and does not know the processes behind it.
"""
