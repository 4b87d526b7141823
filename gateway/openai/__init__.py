"""OpenAI's API: validation of bodies, construction of prompts, replies and streams. Handlers are in `endpoints`."""
