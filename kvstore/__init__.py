"""Distributed KV store of large immutable values: nodes (`node`, `state`, `disk`), their `directory`, and the `client`.
Imports `protocol` and `transfer` only."""
