"""The cluster as one gateway sees it: who is there, whom to avoid, and figures of the last minute."""
