"""Traces of real traffic: their format, prompts built from them, replay against an endpoint, reports.

Knows the HTTP interface of an endpoint as any client does, and nothing of the processes behind it.
"""
