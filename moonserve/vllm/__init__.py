"""moonserve inside vLLM: what runs in vLLM's own process and imports vLLM and torch from its environment.

The package lies in this folder, not in the repository's top folder, where the name `vllm` would hide vLLM itself.
"""
