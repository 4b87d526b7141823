"""The choices of one request: how many are drawn of each prompt, with which seeds, and which ones the client gets."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from gateway.errors import ApiError
from gateway.replies.feed import Piece
from gateway.wishes.params import Limits, Prompt, check_count, check_prompt
from gateway.wishes.sampling import SEED_MASK, sampling_for
from gateway.wishes.schema import SamplingBody
from gateway.wishes.wish import Choice

MAX_PROMPT_LOGPROBS = 131_072
"""Numbers in one reply; writing them takes a good part of a second, in which the gateway does nothing else."""


def choices_for(
    body: SamplingBody,
    prompts: Sequence[Prompt],
    limits: Limits,
    param: str,
    *,
    grammar: str = "",
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> tuple[Choice, ...]:
    """Those that are drawn of each prompt, numbered through. Choice i of a prompt samples with seed + i. `grammar`:
    that all of them follow; empty = none. Of a prompt that is scored the first choice has it done. Raises ApiError."""
    count = body.num_drawn
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


def _check_scored(choices: Sequence[Choice], num_told: int) -> None:
    """`num_told`: choices of each prompt, which all tell of it."""
    wanted = num_told * sum(
        len(choice.token_ids) * (1 + choice.sampling.num_prompt_logprobs)
        for choice in choices
        if choice.sampling.num_prompt_logprobs is not None
    )
    if wanted > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"{wanted} log-probabilities of prompts are more than {MAX_PROMPT_LOGPROBS} in one reply; ask for fewer of"
            " each token, or for fewer prompts at once",
            param="prompt_logprobs",
            code="invalid_value",
        )


def best(
    choices: Sequence[Sequence[Piece]], *, num_drawn: int, num_kept: int
) -> list[Sequence[Piece]]:
    """Of each prompt's `num_drawn` answers the `num_kept` of the greatest cumulative log-probability, best first; as
    they are where all are kept."""
    if num_drawn == num_kept:
        return list(choices)
    kept: list[Sequence[Piece]] = []
    for start in range(0, len(choices), num_drawn):
        of_prompt = sorted(choices[start : start + num_drawn], key=_cumulative, reverse=True)
        kept += of_prompt[:num_kept]
    return kept


def _cumulative(pieces: Sequence[Piece]) -> float:
    tokens = (token for piece in pieces for token in piece.tokens)
    return sum(token.logprobs.sampled for token in tokens if token.logprobs is not None)
