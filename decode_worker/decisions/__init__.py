"""The parts of a decode worker's pure state: leases, admission, scheduling, steps, offloading. No I/O, no clock."""
