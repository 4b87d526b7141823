"""The cluster's global scheduler: membership, the index of cached blocks, and the placement of each request."""
