"""Translation of a request's sampling parameters into vLLM's. Pure; does not import vLLM.

Every field of the wire message `SamplingParams` has a line in `WAYS`; a test compares the two. Two engines generate one
answer, so parameters that look at the whole answer cannot be vLLM's: its decode worker takes the first token for a part
of the prompt. They are applied by `logits_processor`, which gets the request's own parameters and the prompt's length.

A seed: vLLM draws from a generator that it seeds per request. With `exact` draws the logits processor draws instead,
with the own engine's sampler, from (seed, position) alone. Without, each engine that continues an answer gets a seed
made of the request's seed and the index where it starts: an answer is reproducible while no loss divides it
differently.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any

import numpy as np

from moonserve.protocol.pb import common_pb2
from moonserve.protocol.request import LOGPROB_DTYPE, NO_HINTS, RANK_DTYPE, PromptLogprobs, Request, SamplingParams
from moonserve.protocol.rpc.wire import sampling_from_wire, sampling_to_wire


class Way(StrEnum):
    """How a parameter takes effect."""

    PASSED_ON = "vLLM's parameter of that name"
    SHIFTED = "vLLM's, less the number of tokens that were generated before"
    WHOLE_ANSWER = "by the logits processor, which knows the whole answer"
    SEEDED = "by the logits processor, or vLLM's with a seed per part of the answer"


WAYS: dict[str, Way] = {
    "max_tokens": Way.SHIFTED,
    "min_tokens": Way.SHIFTED,
    "temperature": Way.PASSED_ON,
    "top_p": Way.PASSED_ON,
    "top_k": Way.PASSED_ON,
    "min_p": Way.PASSED_ON,
    "seed": Way.SEEDED,
    "stop_token_ids": Way.PASSED_ON,  # they include the model's own, so vLLM ignores those
    "num_logprobs": Way.PASSED_ON,
    "presence_penalty": Way.WHOLE_ANSWER,
    "frequency_penalty": Way.WHOLE_ANSWER,
    "repetition_penalty": Way.PASSED_ON,  # it counts the prompt, too
    "logit_bias": Way.PASSED_ON,
    "grammar": Way.WHOLE_ANSWER,
    "bad_words": Way.WHOLE_ANSWER,
    "num_prompt_logprobs": Way.PASSED_ON,
}

EXTRA = "moonserve"
"""Key of `extra_args` under which the logits processor finds its part."""

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` that routers send to a prefill server."""
_SEED_BITS = 63  # torch takes seeds up to 2^64, vLLM's check is narrower


def engine_parameters(request: Request, *, max_new_tokens: int | None = None, exact: bool) -> dict[str, Any]:
    """Returns the arguments of vLLM's `SamplingParams` that generate the request's next tokens, at most
    `max_new_tokens` of them. `exact`: draws depend on (seed, position) only."""
    sampling, first = request.sampling, request.first_index
    left = sampling.max_tokens - first
    given: dict[str, Any] = {
        "max_tokens": left if max_new_tokens is None else min(left, max_new_tokens),
        "min_tokens": 0 if sampling.grammar else max(0, sampling.min_tokens - first),
        "ignore_eos": True,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "logprobs": sampling.num_logprobs,
        "prompt_logprobs": sampling.num_prompt_logprobs if request.scores_prompt else None,
        "temperature": sampling.temperature,
        "detokenize": False,
        "skip_clone": True,
    }
    given["min_tokens"] = min(given["min_tokens"], given["max_tokens"])
    is_drawn = sampling.temperature > 0
    if needs_processor(sampling) or (exact and is_drawn):
        given["extra_args"] = {EXTRA: _for_processor(request, draws=exact and is_drawn)}
    else:
        given |= {"repetition_penalty": sampling.repetition_penalty, "logit_bias": dict(sampling.logit_bias) or None}
    if exact:
        given["temperature"] = 0.0  # the processor leaves one token
    elif is_drawn:
        given |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        given["seed"] = seed_of_part(sampling.seed, first)
    return given


def needs_processor(sampling: SamplingParams) -> bool:
    """True if a parameter looks at the whole answer. All adjustments of logits are then made together, in order."""
    looks_back = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    return looks_back or bool(sampling.grammar or sampling.bad_words)


def transfer_parameters(request: Request, is_prefill: bool, given: str) -> dict[str, Any] | None:
    """Returns a request's `kv_transfer_params`. `given`: those with which its KV is found, as JSON; empty = none."""
    found: dict[str, Any] = dict(REMOTE_DECODE) if is_prefill else json.loads(given or "{}")
    if request.cache_hints != NO_HINTS:
        found["cache_hints"] = asdict(request.cache_hints)
    return found or None


def prompt_logprobs(request: Request, found: Sequence[Mapping[int, tuple[float, int]]]) -> PromptLogprobs:
    """Returns the log-probabilities of a prompt. `found`: log-probability and rank by candidate, for each token but the
    first."""
    num_top = request.sampling.num_prompt_logprobs or 0
    own = [each[token_id] for token_id, each in zip(request.token_ids[1:], found, strict=False)]
    best = [sorted(each.items(), key=lambda item: item[1][1])[:num_top] for each in found[: len(own)]]
    shape = (len(own), num_top)
    return PromptLogprobs(
        logprobs=np.array([logprob for logprob, _ in own], LOGPROB_DTYPE),
        ranks=np.array([rank for _, rank in own], RANK_DTYPE),
        top_ids=np.array([[token_id for token_id, _ in row] for row in best], RANK_DTYPE).reshape(shape),
        top_logprobs=np.array([[value for _, (value, _) in row] for row in best], LOGPROB_DTYPE).reshape(shape),
    )


def scheduling_priority(priority: int, place: float) -> int:
    """Returns vLLM's priority of a request, lowest first: by `priority`, then by `place`, in seconds since a common
    start. Priorities beyond ±2²¹ are as these."""
    most = 1 << 21
    return (max(-most, min(priority, most)) << 41) + round(place * 1000)  # in a signed integer of 64 bits


def seed_of_part(seed: int, first_index: int) -> int:
    """Returns vLLM's seed for the part of an answer that starts at `first_index`."""
    digest = hashlib.blake2b(f"{seed}/{first_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _for_processor(request: Request, *, draws: bool) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "num_prompt_tokens": request.num_prompt_tokens,
        "sampling": base64.b64encode(sampling_to_wire(request.sampling).SerializeToString()).decode(),
        "draws": draws,
    }


def sampling_of_processor(part: dict[str, Any]) -> SamplingParams:
    """Returns the request's own parameters from the logits processor's part of `extra_args`."""
    message = common_pb2.SamplingParams.FromString(base64.b64decode(part["sampling"]))
    return sampling_from_wire(message)
