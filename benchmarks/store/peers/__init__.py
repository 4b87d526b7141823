"""Other stores as contestants. Their modules run in a separate environment (.venv-bench)."""
