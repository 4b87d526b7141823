"""The shm transport: peers under one kernel map or read each other's memory and copy bytes once."""
