"""From a model folder to sampled tokens. Loaded once: config.py, weights.py, partition.py (stages and shards); per
step: batch.py (input and output), step_builder.py, forward_pass.py, sampler.py, grammar_masks.py."""
