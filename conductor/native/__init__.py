"""The loops of a placement that numpy takes too many calls for, in C."""
