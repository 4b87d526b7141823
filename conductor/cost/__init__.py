"""Cost models behind every prediction, one per file."""
