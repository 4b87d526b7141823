"""Checks and measurements of one machine: `moonserve doctor` (readiness, transports), `moonserve profile` (speed of a
model). doctor.py and profile.py are the commands."""
