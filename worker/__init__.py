"""What prefill and decode workers share: process, RPC service, timers, streams of tokens, metrics. Decisions are in the
workers' own state.py."""
