"""Other engines as contestants. All but transformers run in a separate Python environment."""
