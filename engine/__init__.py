"""One model replica; the only package that imports torch. Flags: config.py; start: replica.py; one step: engine.py;
admission and preemption by need of KV blocks: admission_policy.py, lookahead_policy.py."""
