"""Other stores. Their modules run in an environment of their own (.venv-bench)."""
