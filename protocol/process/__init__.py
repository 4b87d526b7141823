"""What every process needs around its work: configuration, life cycle, event loop, logs, metrics, traces, TLS, native
libraries."""
