"""moonserve inside SGLang: a storage backend of its hierarchical cache (docs/vllm.md)."""
