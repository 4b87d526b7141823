"""The ways between two engines: found out, chosen, rested and capped. Pure but for `discovery`."""
