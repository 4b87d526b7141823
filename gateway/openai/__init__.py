"""OpenAI's API: bodies checked, prompts made, output as replies and streams. Its handlers are in endpoints.py."""
