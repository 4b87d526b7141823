"""Process and I/O of a store node: RPCs (`service`), disk moves (`tier_mover`), removals and copies among nodes.
Decisions are in `kvstore.state`."""
