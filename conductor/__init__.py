"""The cluster's global scheduler: who belongs to it, who holds which block, and where each request goes."""
