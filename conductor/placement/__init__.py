"""Where a request is prefilled and decoded (planner.py), from which candidates, by which policy, if it is admitted, and
the record of the decision. Pure."""
