"""Benchmarks of the engine and of its memory management."""
