"""What a replica needs on an NVIDIA GPU. Nothing here is imported unless it is asked for; see `requirements`."""
