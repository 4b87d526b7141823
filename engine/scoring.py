"""From logits to the log-probabilities of tokens that are there already: a prompt's own.

The row at a position says how likely the token behind it was. They are the model's, before penalties and temperature,
as `engine.sampler` reports them of what it samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import Slice
from protocol.prompt_logprobs import FLOAT, UINT, PromptLogprobs

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
    targets = torch.tensor(
        list(piece.token_ids[piece.start + 1 : piece.start + 1 + len(logits)]), dtype=torch.int64
    )
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
