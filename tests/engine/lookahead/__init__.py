"""Tests of engine.lookahead."""
