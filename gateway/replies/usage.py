"""What a reply ends with, beside its choices: usage, and the times of each phase where the client asks for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.service import Answer
from gateway.wishes.params import Prompt
from gateway.wishes.schema import SamplingBody


def with_timing(body: SamplingBody, reply: bytes, answer: Answer) -> bytes:
    """A reply's JSON object with `x_timing`, where the client wants that."""
    if not body.x_timing:
        return reply
    return reply[:-1] + b',"x_timing":' + json.dumps(answer.timing()).encode() + b"}"


def usage_of(answer: Answer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A prompt counts once, however many choices continue it."""
    states = [generation.state for generation in answer.generations]
    per_prompt = len(states) // len(prompts)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    completion_tokens = sum(len(state.generated) for state in states)
    cached = sum(state.cached_tokens for state in states[::per_prompt])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
