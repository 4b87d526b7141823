"""The loops of a placement that numpy takes too many calls for: in C, each with a twin in numpy that is as right."""
