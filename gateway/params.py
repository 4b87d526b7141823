"""From checked bodies to what the cluster is asked: prompts as tokens, sampling parameters, the model's limits.

Whatever the model or its context cannot do is refused here with 400, so that workers can trust what they get.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.errors import ApiError
from gateway.schema import MAX_CHOICES, ChatBody, ChatMessage, CompletionBody, SamplingBody
from gateway.tokenizer import Tokenizer
from gateway.tools.schema import Tool
from gateway.wish import Choice
from protocol.request import SamplingParams

N = TypeVar("N", int, float)

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# Below this the division by the temperature overflows in float32; it is greedy by any measure.
_GREEDY_BELOW = 1e-5
_SEED_MASK = 2**64 - 1
# Shorter texts encode in less time than a thread takes to start.
_INLINE_CHARS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the served model can take."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_prompt_tokens: int | None = (
        None  # what the operator accepts; None = what the model can take
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as tokens, with its text where the client sent text."""

    token_ids: tuple[int, ...]
    text: str | None


async def encode(
    tokenizer: Tokenizer, text: str, limits: Limits, param: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Tokens of a text, in a thread when it is long. Refuses at once what cannot fit in the context."""
    if len(text) > limits.max_model_len * tokenizer.longest_token:
        at_least = -(-len(text) // tokenizer.longest_token)
        raise _too_long(f"at least {at_least}", limits, param)
    if len(text) <= _INLINE_CHARS:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    return tuple(
        await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    )


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    limits: Limits,
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, object] | None,
    tools: Sequence[Tool] | None = None,
    add_special_tokens: bool = False,
    continues: bool = False,
) -> Prompt:
    """A conversation as one prompt. The template writes special tokens itself. `continues`: the prompt ends where the
    last message's text does."""
    text = tokenizer.render_chat(
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
        variables=variables,
        tools=[tool.for_template() for tool in tools or ()] or None,
    )
    if continues:
        text = cut_behind(text, messages[-1])
    ids = await encode(tokenizer, text, limits, "messages", add_special_tokens=add_special_tokens)
    return Prompt(token_ids=ids, text=text)


def cut_behind(text: str, message: ChatMessage) -> str:
    """A rendered conversation up to the end of its last message's text, which the answer continues. Templates may strip
    a text; the prompt then ends as they have it (as transformers does). Raises ApiError."""
    said = message.for_template()["content"] or ""
    stripped = said.strip()
    if not stripped or stripped not in text:
        raise ApiError(
            400,
            "continue_final_message: the last message has no text that the chat template keeps as it is",
            param="continue_final_message",
            code="invalid_value",
        )
    start = text.rindex(stripped)
    whole = said.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else stripped)]


def truncated(prompt: Prompt, body: SamplingBody, limits: Limits) -> Prompt:
    """The last `truncate_prompt_tokens` tokens of a prompt; −1: as many as leave room for the answer that is wanted."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return prompt
    if wanted == 0:
        raise ApiError(
            400,
            "truncate_prompt_tokens: must be at least 1, or -1 for what the model's context holds",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    if wanted < 0:
        wanted = max(1, limits.max_model_len - max(1, _answer_tokens(body)))
    if len(prompt.token_ids) <= wanted:
        return prompt
    return Prompt(token_ids=prompt.token_ids[-wanted:], text=None)


def _answer_tokens(body: SamplingBody) -> int:
    """That the client asked for; 0 where it did not say."""
    chat = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return chat or body.max_tokens or 0


async def completion_prompts(
    tokenizer: Tokenizer, body: CompletionBody, limits: Limits
) -> list[Prompt]:
    """The prompts of a completions request, in order."""
    prompts = split_prompt(body.prompt)
    _check_count(body, len(prompts), "prompt")
    made = [
        Prompt(
            token_ids=await encode(tokenizer, one, limits, "prompt", add_special_tokens=True),
            text=one,
        )
        if isinstance(one, str)
        else Prompt(token_ids=tuple(one), text=None)
        for one in prompts
    ]
    return [truncated(prompt, body, limits) for prompt in made]


def split_prompt(prompt: object) -> list[str] | list[list[int]]:
    """A string, strings, token ids or lists of token ids → a list of prompts. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _all(prompt, str):
            return prompt
        if _all(prompt, int):
            return [prompt]
        if _all(prompt, list) and all(one and _all(one, int) for one in prompt):
            return prompt
    raise ApiError(
        400,
        "prompt: must be a string, a list of strings, a list of token ids or a list of such lists,"
        " and not empty",
        param="prompt",
        code="invalid_value",
    )


def _all(values: list[object], kind: type) -> bool:
    return all(type(value) is kind for value in values)  # and not isinstance: True is no token id


def choices_for(
    body: SamplingBody, prompts: Sequence[Prompt], limits: Limits, param: str, grammar: str = ""
) -> tuple[Choice, ...]:
    """`n` choices of each prompt, numbered through. Choice i of a prompt samples with seed + i. `grammar`: that all of
    them follow; empty = none."""
    count = body.n or 1
    _check_count(body, len(prompts), param)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    choices: list[Choice] = []
    for prompt in prompts:
        check_prompt(prompt.token_ids, limits, param)
        for offset in range(count):
            sampling = sampling_for(body, len(prompt.token_ids), (seed + offset), limits, grammar)
            choices.append(
                Choice(
                    index=len(choices),
                    token_ids=prompt.token_ids,
                    sampling=sampling,
                    stops=body.stops,
                    skip_special_tokens=body.skip_special_tokens is not False,
                    includes_stop=bool(body.include_stop_str_in_output),
                )
            )
    return tuple(choices)


def _check_count(body: SamplingBody, num_prompts: int, param: str) -> None:
    count = body.n or 1
    if count * num_prompts > MAX_CHOICES:
        raise ApiError(
            400,
            f"{num_prompts} prompts with n={count} are more than {MAX_CHOICES} choices",
            param="n" if count > 1 else param,
            code="invalid_value",
        )


def check_prompt(token_ids: Sequence[int], limits: Limits, param: str) -> None:
    """Raises ApiError for prompts that the model cannot read or continue."""
    if not token_ids:
        raise ApiError(400, f"{param}: the prompt is empty", param=param, code="invalid_value")
    if len(token_ids) >= limits.max_model_len:
        raise _too_long(str(len(token_ids)), limits, param)
    most = limits.max_prompt_tokens
    if most is not None and len(token_ids) > most:
        raise ApiError(
            400,
            f"the prompt has {len(token_ids)} tokens; this server accepts {most}",
            param=param,
            code="context_length_exceeded",
        )
    worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
    if not 0 <= worst < limits.vocab_size:
        raise ApiError(
            400,
            f"{param}: token id {worst} is not in the vocabulary of {limits.vocab_size}",
            param=param,
            code="invalid_value",
        )


def _too_long(num_tokens: str, limits: Limits, param: str) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {num_tokens} tokens; this model's context is {limits.max_model_len}"
        " tokens, of which at least one is for the output",
        param=param,
        code="context_length_exceeded",
    )


def sampling_for(
    body: SamplingBody, num_prompt_tokens: int, seed: int, limits: Limits, grammar: str = ""
) -> SamplingParams:
    """The parameters as workers trust them."""
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
        seed=seed & _SEED_MASK,
        stop_token_ids=_stop_token_ids(body, limits),
        num_logprobs=_num_logprobs(body),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, limits),
        grammar=grammar,
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
        if body.echo and body.logprobs is not None:
            raise ApiError(
                400,
                "echo together with logprobs is not supported by this server yet",
                param="echo",
                code="unsupported_parameter",
            )
        return body.logprobs
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
