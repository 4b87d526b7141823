"""How many replicas blocks have: what is read often gains some, what cools down loses them, what a node that goes away
alone holds gets another home. Decisions (`heat`, `planner`) are pure; `shell` has them carried out by the nodes."""
