"""Leader election among several conductors, and the replies of the others (docs/conductor-availability.md)."""
