"""Which of several conductors leads, and what the others answer meanwhile (docs/conductor-availability.md)."""
