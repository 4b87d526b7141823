"""Prefill and decode workers whose engine is vLLM. Decisions are in `state.py`, what vLLM is told is in `sampling.py`
and `config.py`; `engine.py` is the only module that calls vLLM's engine."""
