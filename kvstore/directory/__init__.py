"""Directory of which nodes hold which blocks (`holders`), and its process (`service`), which makes replicas of hot
blocks (decided by `replica_planner`)."""

from moonserve.kvstore.directory.block_table import LeadingHolders
from moonserve.kvstore.directory.holders import Changes, Directory

__all__ = ["Changes", "Directory", "LeadingHolders"]
