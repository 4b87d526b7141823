"""The parts of a prefill worker's pure state: queue, preparation, steps, handoffs, reads and writes of stored blocks.
No I/O, no clock."""
