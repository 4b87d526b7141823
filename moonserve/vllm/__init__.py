"""moonserve inside vLLM: a KV connector, and prefill and decode workers whose engine is vLLM. Only this package imports
`vllm`; it runs in vLLM's environment, which has no more of moonserve's requirements than the basic ones."""
