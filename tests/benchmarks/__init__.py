"""Tests that run each benchmark end to end at a tiny size. The figures at that size mean nothing."""
