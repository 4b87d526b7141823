"""The door of the cluster: an OpenAI-compatible HTTP server that turns text into tokens and tokens into text.

Owns HTTP, validation, tokenizing, chat templates, streams and retries. Knows neither tensors nor where KV lies; it
asks the conductor where to send a request and listens to the workers' token streams.
"""
