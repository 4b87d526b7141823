"""Tool calls: the tools that clients offer, the grammar that enforces calls, and parsing of calls in streamed text."""
