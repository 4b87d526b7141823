"""Predicted times and loads of every instance: queue, transfer and compute time, decode load, and what reports correct.
Pure; loops in native/."""
