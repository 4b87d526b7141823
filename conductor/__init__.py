"""Global scheduler: members, index of cached blocks, placement. Decisions: state.py over placement/ and prediction/,
leader_election_state.py, role_switching.py; I/O: service.py, leader_election_service.py."""
