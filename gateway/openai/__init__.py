"""OpenAI's API: request bodies, their prompts, sampling parameters and grammars, and the format of replies; chat and
completions, Responses."""
