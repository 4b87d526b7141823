"""From logits to tokens.

A token is a function of its row of logits, its sequence's history and (seed, position), never of the rest of the
batch, of time or of what was sampled before; that is what lets a request move between workers. Penalties, filters and
their order are vLLM's: penalties and bias, then temperature, min-p, top-k, top-p. What a grammar forbids is never
taken, whatever they say; a token that completes a bad word only where nothing else is left. Log-probabilities are those
of the model, before any of that.

Draws come from Philox 4x64-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3"). The same (key, counter) gives the same bits in every process and on every machine, which is what makes a
sampled stream continuable elsewhere. Plain integers: one number per token is wanted, not arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Sampled, Slice
from engine.grammar_masks import Allowed, Mask
from protocol.prompt_logprobs import FLOAT, UINT, PromptLogprobs
from protocol.request import Logprobs, SamplingParams

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone."""
    return (random_bits(seed & _MASK, position) >> 11) * 2.0**-53


def random_bits(key: int, counter: int) -> int:
    """The first 64 bits for this key and counter."""
    x0, x1, x2, x3 = counter & _MASK, 0, 0, 0
    k0, k1 = key, 0
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * x0
        product1 = _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (product1 >> 64) ^ x1 ^ k0,
            product1 & _MASK,
            (product0 >> 64) ^ x3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return x0


GREEDY_TEMPERATURE = 1e-5  # below it, dividing by the temperature only loses precision

Row = npt.NDArray[np.float32]


def is_greedy_alone(slices: Sequence[Slice]) -> bool:
    """Whether the largest logits are all that is wanted: then `argmax` may choose where they are."""
    return all(_is_plain(piece) for piece in slices)


def sample(
    logits: torch.Tensor,
    slices: Sequence[Slice],
    allowed: Sequence[Allowed | None] | None = None,
) -> list[Sampled]:
    """The next token of each slice. `logits`: [slices, vocab] float32 on any device, left unchanged. `allowed`: what
    grammars leave, per slice; None = everything."""
    if logits.is_cuda and not is_greedy_alone(slices):
        logits = logits.cpu()
    allowed = allowed or [None] * len(slices)
    masks = [None if one is None else one.mask for one in allowed]
    token_ids = _choose(logits, slices, masks)
    logprobs = _logprobs(logits, slices, token_ids)
    return [
        Sampled(
            request_id=piece.request_id,
            token_id=token_id,
            logprobs=found,
            failure=None if one is None else one.failure,
        )
        for piece, token_id, found, one in zip(slices, token_ids, logprobs, allowed, strict=True)
    ]


def _is_plain(piece: Slice) -> bool:
    """Whether the largest logit is all that is wanted."""
    sampling = piece.sampling
    is_greedy = sampling.temperature <= GREEDY_TEMPERATURE
    return is_greedy and sampling.num_logprobs is None and not _is_adjusted(piece)


def _choose(logits: torch.Tensor, slices: Sequence[Slice], masks: Sequence[Mask | None]) -> list[int]:
    adjusted = [row for row, piece in enumerate(slices) if _is_adjusted(piece)]
    if adjusted:
        logits = logits.clone()
        for row in adjusted:
            adjust(logits[row].numpy(), slices[row], masks[row])
    token_ids = _best(logits)
    random = [row for row, piece in enumerate(slices) if piece.sampling.temperature > GREEDY_TEMPERATURE]
    if random:
        weights = _weights(logits, random, slices)
        for row, row_weights in zip(random, weights, strict=True):
            token_ids[row] = draw(row_weights, slices[row].sampling, slices[row].end)
    return token_ids


def _best(logits: torch.Tensor) -> list[int]:
    """The largest of each row, the first of equals. On the host numpy finds it ten times as fast as torch."""
    best = logits.argmax(dim=-1) if logits.is_cuda else logits.numpy().argmax(axis=-1)
    token_ids: list[int] = best.tolist()
    return token_ids


def _weights(logits: torch.Tensor, rows: Sequence[int], slices: Sequence[Slice]) -> npt.NDArray[np.float32]:
    """Probabilities at each row's temperature."""
    temperatures = torch.tensor([[slices[row].sampling.temperature] for row in rows])
    chosen = logits if len(rows) == len(slices) else logits[list(rows)]
    probabilities: npt.NDArray[np.float32] = torch.softmax(chosen / temperatures, dim=-1).numpy()
    return probabilities


# -- what happens to logits before a choice


def _is_adjusted(piece: Slice) -> bool:
    sampling = piece.sampling
    changes_row = sampling.needs_history or bool(sampling.logit_bias) or bool(sampling.grammar)
    return changes_row or bool(sampling.bad_words) or _may_not_stop(piece)


def _may_not_stop(piece: Slice) -> bool:
    index = piece.end - piece.num_prompt_tokens
    return index < piece.sampling.min_tokens and bool(piece.sampling.stop_token_ids)


def adjust(row: Row, piece: Slice, mask: Mask | None = None) -> None:
    """Applies penalties, bias, a grammar's mask, bad words and min_tokens to one row of logits, in place."""
    sampling = piece.sampling
    if sampling.penalizes:
        history = np.asarray(piece.token_ids[: piece.end], dtype=np.int64)
        _penalize(row, history, piece.num_prompt_tokens, sampling)
    for token_id, bias in sampling.logit_bias.items():
        row[token_id] += bias
    if mask is not None:
        row[~mask] = -np.inf
    if sampling.bad_words:
        _forbid(row, _completing(piece))
    if _may_not_stop(piece):
        _forbid(row, list(sampling.stop_token_ids))


def _forbid(row: Row, token_ids: list[int]) -> None:
    """Unless nothing else is left: a complete answer ends, though `min_tokens` has not been reached, and a form that
    leaves only a bad word is kept to."""
    before = row[token_ids]
    row[token_ids] = -np.inf
    if row.max() == -np.inf:
        row[token_ids] = before


def _completing(piece: Slice) -> list[int]:
    """Tokens with which the output would have a bad word."""
    output = piece.token_ids[piece.num_prompt_tokens : piece.end]
    return [
        word[-1]
        for word in piece.sampling.bad_words
        if len(word) <= len(output) + 1 and tuple(output[len(output) + 1 - len(word) :]) == word[:-1]
    ]


def _penalize(row: Row, history: npt.NDArray[np.int64], num_prompt_tokens: int, sampling: SamplingParams) -> None:
    """Repetition over prompt and output, presence and frequency over the output only."""
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(history)
        values = row[seen]
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    tokens, counts = np.unique(history[num_prompt_tokens:], return_counts=True)
    row[tokens] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)


# -- choosing at random


def draw(weights: Row, sampling: SamplingParams, position: int) -> int:
    """A token with probability proportional to its weight after filtering: the inverse of the distribution function
    in vocabulary order, at the number that belongs to (seed, position)."""
    candidates = filter_tokens(weights, sampling)
    kept = weights if candidates is None else weights[candidates]
    cumulative = _cumulative(kept)
    target = uniform(sampling.seed, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    if target >= cumulative[-1]:  # by rounding; the last one that has any weight
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index if candidates is None else int(candidates[index])


def filter_tokens(weights: Row, sampling: SamplingParams) -> npt.NDArray[np.intp] | None:
    """The tokens that min-p, top-k and top-p leave, in vocabulary order; None = all. Ties go to the lower token."""
    if sampling.min_p <= 0 and sampling.top_p >= 1 and not 0 < sampling.top_k < len(weights):
        return None
    total = float(weights.sum(dtype=np.float64))
    best_first = _best_first(weights, _floor(weights, total, sampling), sampling.top_k)
    if sampling.top_p < 1:
        best_first = best_first[: _nucleus(best_first, total, sampling)]
    candidates = np.flatnonzero(weights >= best_first[-1])
    surplus = len(candidates) - len(best_first)
    if surplus > 0:
        tied = np.flatnonzero(weights[candidates] == best_first[-1])
        candidates = np.delete(candidates, tied[-surplus:])
    return candidates


def _best_first(weights: Row, floor: float, top_k: int) -> Row:
    """Weights not below `floor`, at most `top_k` of them if that is positive, in descending order."""
    if 0 < top_k < len(weights):
        best: Row = torch.from_numpy(weights).topk(top_k).values.numpy()
        return best[best >= floor]
    return np.sort(weights[weights >= floor])[::-1].copy()


def _floor(weights: Row, total: float, sampling: SamplingParams) -> float:
    """A weight below which no token can stay. For top-p alone: all tokens below (1 - p) / vocab of the total together
    weigh less than 1 - p of it, so the nucleus lies above; that spares sorting the whole vocabulary."""
    if _is_top_p_alone(sampling):
        return (1 - sampling.top_p) * total / len(weights) * 0.5  # half: rounding must not matter
    return sampling.min_p * float(weights.max())


def _nucleus(best_first: Row, total: float, sampling: SamplingParams) -> int:
    """How many of the best tokens it takes to reach top_p of what the other filters left."""
    cumulative = _cumulative(best_first)
    whole = total if _is_top_p_alone(sampling) else float(cumulative[-1])
    return int(np.searchsorted(cumulative, sampling.top_p * whole, side="left")) + 1


def _cumulative(weights: Row) -> npt.NDArray[np.float64]:
    """Running sums in double precision; torch is three times as fast at them as numpy."""
    sums: npt.NDArray[np.float64] = torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    return sums


def _is_top_p_alone(sampling: SamplingParams) -> bool:
    return sampling.top_p < 1 and sampling.top_k <= 0 and sampling.min_p <= 0


# -- reporting


def _logprobs(logits: torch.Tensor, slices: Sequence[Slice], token_ids: Sequence[int]) -> list[Logprobs | None]:
    found: list[Logprobs | None] = [None] * len(slices)
    rows = [row for row, piece in enumerate(slices) if piece.sampling.num_logprobs is not None]
    if not rows:
        return found
    normalized = torch.log_softmax(logits if len(rows) == len(slices) else logits[rows], dim=-1)
    for row, values in zip(rows, normalized, strict=True):
        num_top = slices[row].sampling.num_logprobs or 0
        found[row] = _row_logprobs(values, token_ids[row], min(num_top, len(values)))
    return found


def _row_logprobs(values: torch.Tensor, token_id: int, num_top: int) -> Logprobs:
    sampled = float(values[token_id])
    if num_top == 0:
        return Logprobs(sampled)
    best, ids = values.topk(num_top)
    return Logprobs(sampled, tuple(zip(ids.tolist(), best.tolist(), strict=True)))


# -- tokens that are there already: a prompt's own, of the model as above

_ROWS_AT_ONCE = 32  # of a large vocabulary's logits, normalized beside what the step has


def num_scored(piece: Slice) -> int:
    """How many of a slice's rows, the leading ones, say how likely a token of its prompt was."""
    if piece.scores is None:
        return 0
    return max(0, min(piece.end, piece.num_prompt_tokens - 1) - piece.start)


def score_prompts(logits: torch.Tensor, slices: Sequence[Slice]) -> torch.Tensor:
    """Puts into each slice's `scores` what its rows say. `logits` [rows, vocab] float32: of each slice those that score
    and then, where it samples, one more. The result is those that sample."""
    if all(piece.scores is None for piece in slices):
        return logits
    sampling: list[int] = []
    row = 0
    for piece in slices:
        count = num_scored(piece)
        if piece.scores is not None:
            run = _score(logits[row : row + count], piece, piece.scores.num_top)
            piece.scores.put(piece.start, run)
        row += count
        if piece.samples:
            sampling.append(row)
            row += 1
    return logits[sampling]


def _score(logits: torch.Tensor, piece: Slice, num_top: int) -> PromptLogprobs:
    targets = torch.tensor(list(piece.token_ids[piece.start + 1 : piece.start + 1 + len(logits)]), dtype=torch.int64)
    wanted, num_found = targets.to(logits.device), min(num_top, logits.shape[1])
    runs = [
        _score_rows(logits[at : at + _ROWS_AT_ONCE], wanted[at : at + _ROWS_AT_ONCE], num_found)
        for at in range(0, len(logits), _ROWS_AT_ONCE)
    ]
    return PromptLogprobs.joined(runs, num_top)


def _score_rows(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> PromptLogprobs:
    values = torch.log_softmax(logits, dim=-1)
    found = values.gather(1, targets[:, None])
    best, ids = values.topk(num_top, dim=-1)
    return PromptLogprobs(
        logprobs=found[:, 0].cpu().numpy().astype(FLOAT),
        ranks=((values > found).sum(dim=-1) + 1).cpu().numpy().astype(UINT),
        top_ids=ids.cpu().numpy().astype(UINT),
        top_logprobs=best.cpu().numpy().astype(FLOAT),
    )
