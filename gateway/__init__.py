"""OpenAI-compatible HTTP server: text into tokens and tokens into text. server.py builds all parts; requests come in
through http/ and openai/, run in generation/."""
