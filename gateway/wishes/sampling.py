"""From checked bodies to sampling parameters as workers trust them.

Whatever the model cannot do is refused here with 400.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gateway.errors import ApiError
from gateway.wishes.params import Limits
from gateway.wishes.schema import ChatBody, CompletionBody, SamplingBody
from protocol.request import SamplingParams

N = TypeVar("N", int, float)

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# Below this the division by the temperature overflows in float32; it is greedy by any measure.
_GREEDY_BELOW = 1e-5
SEED_MASK = 2**64 - 1


def sampling_for(
    body: SamplingBody,
    num_prompt_tokens: int,
    seed: int,
    limits: Limits,
    grammar: str = "",
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Of one choice, whose prompt's tokens are scored where that is wanted. Raises ApiError."""
    max_tokens = _max_tokens(body, num_prompt_tokens, limits)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens is {min_tokens}, more than max_tokens, {max_tokens}",
            param="min_tokens",
            code="invalid_value",
        )
    temperature = _or(body.temperature, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, _or(body.top_k, 0)),
        min_p=_or(body.min_p, 0.0),
        seed=seed & SEED_MASK,
        stop_token_ids=_stop_token_ids(body, limits),
        num_logprobs=_num_logprobs(body),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, limits),
        grammar=grammar,
        bad_words=bad_words,
        num_prompt_logprobs=_num_prompt_logprobs(body),
    )


def _or(value: N | None, default: N) -> N:
    return default if value is None else value


def _max_tokens(body: SamplingBody, num_prompt_tokens: int, limits: Limits) -> int:
    room = limits.max_model_len - num_prompt_tokens
    param, wanted = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        param, wanted = "max_completion_tokens", body.max_completion_tokens
    if wanted is None:
        return room if isinstance(body, ChatBody) else min(room, _DEFAULT_COMPLETION_TOKENS)
    if wanted > room:
        raise ApiError(
            400,
            f"the prompt has {num_prompt_tokens} tokens and {param} is {wanted}; together they"
            f" exceed this model's context of {limits.max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        )
    return wanted


def _stop_token_ids(body: SamplingBody, limits: Limits) -> frozenset[int]:
    wanted = frozenset(body.stop_token_ids or ())
    _check_vocabulary(wanted, limits, "stop_token_ids")
    return wanted if body.ignore_eos else wanted | limits.eos_token_ids


def _num_logprobs(body: SamplingBody) -> int | None:
    if isinstance(body, CompletionBody):
        ranked = 0 if body.num_drawn > body.num_choices else None  # by what was sampled
        return ranked if body.logprobs is None else body.logprobs
    if isinstance(body, ChatBody) and body.logprobs:
        return body.top_logprobs or 0
    if isinstance(body, ChatBody) and body.top_logprobs:
        raise ApiError(
            400,
            "top_logprobs needs logprobs to be true",
            param="top_logprobs",
            code="invalid_value",
        )
    return None


def _num_prompt_logprobs(body: SamplingBody) -> int | None:
    """Enough for all forms in which they are told."""
    echoed = body.echoed_logprobs if isinstance(body, CompletionBody) else None
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(
            400,
            "prompt_logprobs does not go with stream; leave one of the two out",
            param="prompt_logprobs",
            code="invalid_value",
        )
    wanted = [each for each in (echoed, body.prompt_logprobs) if each is not None]
    return max(wanted, default=None)


def _logit_bias(body: SamplingBody, limits: Limits) -> dict[int, float]:
    try:
        bias = {int(token_id): value for token_id, value in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise ApiError(
            400,
            "logit_bias: its keys must be token ids",
            param="logit_bias",
            code="invalid_value",
        ) from error
    _check_vocabulary(bias, limits, "logit_bias")
    return bias


def _check_vocabulary(
    token_ids: frozenset[int] | Mapping[int, float], limits: Limits, param: str
) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise ApiError(
                400,
                f"{param}: token id {token_id} is not in the vocabulary of {limits.vocab_size}",
                param=param,
                code="invalid_value",
            )
