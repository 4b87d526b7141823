"""Access to one store node: mapped memory, one-sided reads, inline messages, leases and reservations."""
