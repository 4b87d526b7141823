"""Directory of which nodes hold which blocks: the index (`Directory`) and the process that feeds it node events."""

from kvstore.directory.index import Changes, Directory
from kvstore.directory.table import Leading

__all__ = ["Changes", "Directory", "Leading"]
