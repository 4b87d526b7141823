"""All that needs a GPU to be verified, in one table: `benchmarks/gpu_check.sh`."""
