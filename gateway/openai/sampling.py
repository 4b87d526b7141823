"""Choices of one request, with their sampling parameters."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from moonserve.gateway.errors import ApiError, invalid
from moonserve.gateway.generation.events import Choice
from moonserve.gateway.openai.prompts import Limits, Prompt, check_count, check_prompt, check_vocabulary
from moonserve.gateway.openai.request_schema import ChatBody, CompletionBody, SamplingBody
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.request import SamplingParams

MAX_PROMPT_LOGPROBS = 131_072
"""Maximum number of values in one reply. Writing them takes a good part of a second and blocks the gateway."""


def choices_for(
    body: SamplingBody,
    prompts: Sequence[Prompt],
    limits: Limits,
    param: str,
    *,
    grammar: str = "",
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> tuple[Choice, ...]:
    """Returns the choices of all prompts, numbered consecutively. Choice i of a prompt samples with seed + i.
    `grammar`: grammar of all choices; empty = none. If a prompt is scored, its first choice does it. Raises ApiError.
    """
    count = body.num_choices
    check_count(body, len(prompts), param)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    choices: list[Choice] = []
    for prompt in prompts:
        check_prompt(prompt.token_ids, limits, param)
        num_tokens = len(prompt.token_ids)
        sampling = sampling_for(body, num_tokens, seed, limits, grammar, bad_words)
        for offset in range(count):
            if offset:
                own = (seed + offset) & SEED_MASK
                sampling = replace(sampling, seed=own, num_prompt_logprobs=None)
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
    _check_scored(choices, body.num_choices)
    return tuple(choices)


def _check_scored(choices: Sequence[Choice], num_reporting: int) -> None:
    """Raises ApiError for too many values. `num_reporting`: number of choices per prompt, which all report them."""
    wanted = num_reporting * sum(
        len(choice.token_ids) * (1 + choice.sampling.num_prompt_logprobs)
        for choice in choices
        if choice.sampling.num_prompt_logprobs is not None
    )
    if wanted > MAX_PROMPT_LOGPROBS:
        raise invalid(
            f"{wanted} log-probabilities of prompts exceed the limit of {MAX_PROMPT_LOGPROBS} per reply; request fewer"
            " of each token, or fewer prompts",
            "prompt_logprobs",
        )


_COPIED = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
# Below this, division by the temperature overflows in float32; sampling is practically greedy.
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
    """Returns the parameters of one choice, including prompt scoring if requested. Raises ApiError."""
    max_tokens = _max_tokens(body, num_prompt_tokens, limits)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(f"min_tokens ({min_tokens}) is larger than max_tokens ({max_tokens})", "min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    given = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(0, body.top_k or 0),
        seed=seed & SEED_MASK,
        stop_token_ids=_stop_token_ids(body, limits),
        num_logprobs=_num_logprobs(body),
        logit_bias=_logit_bias(body, limits),
        grammar=grammar,
        bad_words=bad_words,
        num_prompt_logprobs=_num_prompt_logprobs(body),
        **given,
    )


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
    check_vocabulary(wanted, limits.vocab_size, "stop_token_ids")
    return wanted if body.ignore_eos else wanted | limits.eos_token_ids


def _num_logprobs(body: SamplingBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if isinstance(body, ChatBody) and body.logprobs:
        return body.top_logprobs or 0
    if isinstance(body, ChatBody) and body.top_logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def _num_prompt_logprobs(body: SamplingBody) -> int | None:
    """Returns a number that is enough for all requested forms."""
    echoed = body.echoed_logprobs if isinstance(body, CompletionBody) else None
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs and stream cannot be combined; omit one of them", "prompt_logprobs")
    wanted = [each for each in (echoed, body.prompt_logprobs) if each is not None]
    return max(wanted, default=None)


def _logit_bias(body: SamplingBody, limits: Limits) -> dict[int, float]:
    try:
        bias = {int(token_id): value for token_id, value in (body.logit_bias or {}).items()}
    except ValueError as error:
        raise invalid("logit_bias: keys must be token ids", "logit_bias") from error
    check_vocabulary(bias, limits.vocab_size, "logit_bias")
    return bias


def spellings(tokenizer: Tokenizer, words: Sequence[str] | None, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Returns the token sequences of the words, without duplicates, in order; each word also with a leading space.
    Raises ApiError for a word that the model cannot write."""
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words or ()):
        for text in (word, f" {word.lstrip()}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids or max(token_ids) >= limits.vocab_size:
                raise invalid(
                    f"bad_words[{place}]: the model has no tokens for {word!r}",
                    f"bad_words[{place}]",
                )
            found[token_ids] = None
    return tuple(found)
