"""A cluster on Ray: actors supervise the same processes as `moonserve serve`. Decisions: state.py, autoscaler.py,
placement.py; I/O: controller.py, process_actor.py, ray_calls.py."""
