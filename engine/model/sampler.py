"""Sampler: chooses tokens from logits and computes log-probabilities.

A token is a function of its row of logits, its sequence's history and (seed, position). It does not depend on the rest
of the batch, on time or on earlier draws, so a request can move between workers. Penalties, filters and their order are
vLLM's: penalties and bias, then temperature, min-p, top-k, top-p. A token that the grammar forbids is never chosen; a
token that completes a bad word only if nothing else is left. Log-probabilities are the model's, before all of this.

Random numbers come from Philox 4x64-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3"). The same (key, counter) gives the same bits on every machine, so a sampled stream can be continued elsewhere.
Plain integers are used because one number per token is needed, not arrays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moonserve.engine.model.batch import Sampled, Slice
from moonserve.engine.model.grammar_masks import AllowedTokens, Mask
from moonserve.protocol.request import LOGPROB_DTYPE, RANK_DTYPE, Logprobs, PromptLogprobs, SamplingParams

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) that depends only on (seed, position)."""
    return (random_bits(seed & _MASK, position) >> 11) * 2.0**-53


def random_bits(key: int, counter: int) -> int:
    """Returns the first 64 bits of Philox 4x64-10 for this key and counter."""
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


def all_plain_greedy(slices: Sequence[Slice]) -> bool:
    """True if `argmax` alone gives all tokens, so that they can be chosen on the device."""
    return all(_is_plain(piece) for piece in slices)


def sample(
    logits: torch.Tensor,
    slices: Sequence[Slice],
    allowed: Sequence[AllowedTokens | None] | None = None,
) -> list[Sampled]:
    """Samples the next token of each slice. `logits`: [slices, vocab] float32 on any device, left unchanged. `allowed`:
    tokens that each slice's grammar allows; None = all."""
    if logits.is_cuda and not all_plain_greedy(slices):
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
    """True if the slice is greedy, unadjusted and without log-probabilities."""
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
            token_ids[row] = draw_token(row_weights, slices[row].sampling, slices[row].end)
    return token_ids


def _best(logits: torch.Tensor) -> list[int]:
    """Returns the index of each row's largest logit, the lowest of equals. numpy is ten times as fast as torch here."""
    best = logits.argmax(dim=-1) if logits.is_cuda else logits.numpy().argmax(axis=-1)
    token_ids: list[int] = best.tolist()
    return token_ids


def _weights(logits: torch.Tensor, rows: Sequence[int], slices: Sequence[Slice]) -> npt.NDArray[np.float32]:
    """Returns the probabilities [rows, vocab] at each row's temperature."""
    temperatures = torch.tensor([[slices[row].sampling.temperature] for row in rows])
    chosen = logits if len(rows) == len(slices) else logits[list(rows)]
    probabilities: npt.NDArray[np.float32] = torch.softmax(chosen / temperatures, dim=-1).numpy()
    return probabilities


# -- adjustment of logits


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
    """Sets the logits of tokens to -inf, unless no other token is left: then a complete answer may end before
    `min_tokens`, and a grammar that leaves only a bad word is followed."""
    before = row[token_ids]
    row[token_ids] = -np.inf
    if row.max() == -np.inf:
        row[token_ids] = before


def _completing(piece: Slice) -> list[int]:
    """Returns the tokens that would complete a bad word."""
    output = piece.token_ids[piece.num_prompt_tokens : piece.end]
    return [
        word[-1]
        for word in piece.sampling.bad_words
        if len(word) <= len(output) + 1 and tuple(output[len(output) + 1 - len(word) :]) == word[:-1]
    ]


def _penalize(row: Row, history: npt.NDArray[np.int64], num_prompt_tokens: int, sampling: SamplingParams) -> None:
    """Applies penalties in place: repetition over prompt and output, presence and frequency over the output only."""
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(history)
        values = row[seen]
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    tokens, counts = np.unique(history[num_prompt_tokens:], return_counts=True)
    row[tokens] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)


# -- random choice


def draw_token(weights: Row, sampling: SamplingParams, position: int) -> int:
    """Draws a token with probability proportional to its weight after filtering: the inverse of the distribution
    function, in vocabulary order, at the random number of (seed, position)."""
    candidates = filter_tokens(weights, sampling)
    kept = weights if candidates is None else weights[candidates]
    cumulative = _cumulative(kept)
    target = uniform(sampling.seed, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    if target >= cumulative[-1]:  # by rounding: take the last token that has any weight
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index if candidates is None else int(candidates[index])


def filter_tokens(weights: Row, sampling: SamplingParams) -> npt.NDArray[np.intp] | None:
    """Returns the tokens that min-p, top-k and top-p keep, in vocabulary order, or None for all. Ties go to the lower
    token id."""
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
    """Returns the weights not below `floor`, in descending order; at most `top_k` of them if that is positive."""
    if 0 < top_k < len(weights):
        best: Row = torch.from_numpy(weights).topk(top_k).values.numpy()
        return best[best >= floor]
    return np.sort(weights[weights >= floor])[::-1].copy()


def _floor(weights: Row, total: float, sampling: SamplingParams) -> float:
    """Returns a weight below which no token is kept. With top-p alone, all tokens below (1 - p) / vocab of the total
    together weigh less than 1 - p of it, so the nucleus lies above. This avoids sorting the whole vocabulary."""
    if _is_top_p_alone(sampling):
        return (1 - sampling.top_p) * total / len(weights) * 0.5  # halved so that rounding does not matter
    return sampling.min_p * float(weights.max())


def _nucleus(best_first: Row, total: float, sampling: SamplingParams) -> int:
    """Returns how many of the best tokens reach top_p of the weight that the other filters keep."""
    cumulative = _cumulative(best_first)
    whole = total if _is_top_p_alone(sampling) else float(cumulative[-1])
    return int(np.searchsorted(cumulative, sampling.top_p * whole, side="left")) + 1


def _cumulative(weights: Row) -> npt.NDArray[np.float64]:
    """Returns running sums in double precision; torch is three times as fast as numpy here."""
    sums: npt.NDArray[np.float64] = torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    return sums


def _is_top_p_alone(sampling: SamplingParams) -> bool:
    return sampling.top_p < 1 and sampling.top_k <= 0 and sampling.min_p <= 0


# -- log-probabilities


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


# -- log-probabilities of a prompt's own tokens

_ROWS_AT_ONCE = 32  # bounds the memory of normalized logits


def num_scored(piece: Slice) -> int:
    """Returns how many leading rows of a slice score a token of its prompt."""
    return 0 if piece.scores is None else max(0, min(piece.end, piece.num_prompt_tokens - 1) - piece.start)


def score_prompts(logits: torch.Tensor, slices: Sequence[Slice]) -> torch.Tensor:
    """Adds prompt scores to each slice's `scores` and returns the rows of `logits` that are sampled from. `logits`
    [rows, vocab] float32 holds, per slice, its scoring rows and then the rows after which it samples."""
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
            sampling.extend(range(row, row + 1 + piece.num_draft))
            row += 1 + piece.num_draft
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
        logprobs=found[:, 0].cpu().numpy().astype(LOGPROB_DTYPE),
        ranks=((values > found).sum(dim=-1) + 1).cpu().numpy().astype(RANK_DTYPE),
        top_ids=ids.cpu().numpy().astype(RANK_DTYPE),
        top_logprobs=best.cpu().numpy().astype(LOGPROB_DTYPE),
    )
