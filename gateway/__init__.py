"""OpenAI-compatible HTTP server of the cluster. Converts text into tokens and tokens into text.

Owns HTTP, validation, tokenization, chat templates, streams and retries. It does not know tensors or the location of
KV: the conductor decides where a request goes, and the workers' token streams bring the output.
"""
