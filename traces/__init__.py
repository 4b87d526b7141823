"""Traces of real traffic: their format, replay against an endpoint, and reports of simulations."""
