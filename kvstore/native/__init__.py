"""Memory for the metadata of millions of blocks: C over memory that Python owns."""
