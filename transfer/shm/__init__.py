"""The shm transport: peers under one kernel map each other's memory and copy bytes once."""
