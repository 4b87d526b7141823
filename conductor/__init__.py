"""Global scheduler: members, index of cached blocks, placement. Decisions: state.py over placement/, prediction/ and
peers/ (other conductors), role_switching.py; I/O: service.py, peers/*_service.py."""
