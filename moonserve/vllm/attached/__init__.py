"""Workers whose engine is a vLLM server that someone else runs, asked over HTTP. What is said to it is in
`completions.py`, what it tells about itself in `server_facts.py`. Imports neither vLLM nor torch."""
