"""Prefill and decode workers whose engine is vLLM. Decisions are in `state.py`; what vLLM gets is decided in `sampling.py`
and `engine_options.py`; `engine.py` is the only module that calls vLLM's engine."""
