"""Sampled tokens of a step that was begun: on the host, or still on the device, where the next step can use them.

A greedy token is the index of a row's largest logit, which the device finds; its copy to the host is asynchronous. All
other sampling is done on the host (`engine.model.sampler`), which waits for the logits.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from moonserve.engine.cuda.streams import Event, record_event
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.engine.model.grammar_masks import AllowedTokens
from moonserve.engine.model.sampler import all_plain_greedy, sample
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.request import RequestId


class PendingStep:
    """A step that was given to the engine, and its sampled tokens. Steps end in the order in which they were begun."""

    def __init__(
        self,
        num_slices: int,
        places: Sequence[int] = (),
        sampled: Sequence[Sampled] = (),
        *,
        following: Sequence[RequestId] = (),
        on_device: torch.Tensor | None = None,
    ) -> None:
        """`places`: index of the slice of each sampled token, repeated for a slice with a draft. `on_device`: greedy
        tokens [places] int64 that are still on the device, for the requests in `following`; they replace `sampled`."""
        self.on_device = on_device
        self._num_slices = num_slices
        self._places = places
        self._sampled = sampled
        self._request_ids = following or [each.request_id for each in sampled]
        self._arrived: Event | None = None
        if on_device is not None:
            is_cuda = on_device.device.type == "cuda"
            shape, dtype = on_device.shape, on_device.dtype
            self._on_host = torch.empty(shape, dtype=dtype, pin_memory=is_cuda)
            self._on_host.copy_(on_device, non_blocking=True)
            self._arrived = record_event() if is_cuda else None

    def end(self) -> list[Sampled | None]:
        """Waits for the sampled tokens and returns the result of `Engine.execute`."""
        results: list[Sampled | None] = [None] * self._num_slices
        for place, sampled in zip(self._places, self._drawn(), strict=True):
            first = results[place]
            results[place] = sampled if first is None else replace(first, after_draft=(*first.after_draft, sampled))
        return results

    def token_of(self, request_id: RequestId) -> int:
        """Waits for the token of a request and returns it. Raises InvalidRequest if the step sampled none for it."""
        return self._drawn()[self.row_of(request_id)].token_id

    def row_of(self, request_id: RequestId) -> int:
        """Returns the index of a request's token. Raises InvalidRequest if the step sampled none for it."""
        if request_id not in self._request_ids:
            raise InvalidRequest("the previous step sampled no token for this request", request=request_id)
        return self._request_ids.index(request_id)

    def _drawn(self) -> Sequence[Sampled]:
        if self.on_device is None:
            return self._sampled
        if self._arrived is not None:
            self._arrived.synchronize()
        pairs = zip(self._request_ids, self._on_host.tolist(), strict=True)
        return [Sampled(request_id=name, token_id=token) for name, token in pairs]


def sample_step(
    num_slices: int,
    places: Sequence[int],
    sampling: Sequence[Slice],
    logits: torch.Tensor,
    allowed: Sequence[AllowedTokens | None] | None,
    *,
    may_stay: bool,
) -> PendingStep:
    """Samples the tokens of a step. `sampling`: the slices at `places`, one row of `logits` each. `allowed`: see
    `sampler.sample`. `may_stay`: greedy tokens may stay on the device."""
    if not sampling:
        return PendingStep(num_slices)
    if may_stay and all_plain_greedy(sampling):
        names = [piece.request_id for piece in sampling]
        best = logits.argmax(dim=-1)
        return PendingStep(num_slices, places, following=names, on_device=best)
    return PendingStep(num_slices, places, sample(logits, sampling, allowed))


def with_draft_rows(places: Sequence[int], sampling: Sequence[Slice]) -> tuple[list[int], list[Slice]]:
    """Replaces each slice that has a draft by one slice per token that is sampled, with the history up to there, and
    repeats its place."""
    rows = [
        (place, piece if end == piece.end else replace(piece, end=end))
        for place, piece in zip(places, sampling, strict=True)
        for end in range(piece.end - piece.num_draft, piece.end + 1)
    ]
    return [place for place, _ in rows], [piece for _, piece in rows]


def with_history(slices: Sequence[Slice], before: PendingStep) -> list[Slice]:
    """Completes `token_ids` of slices whose sampling reads them but whose last token is only in `before`. This token is
    already on the host, since sampling that reads the history is done there."""
    return [
        replace(piece, token_ids=[*piece.token_ids[: piece.start], before.token_of(piece.request_id)])
        if piece.token_from_previous_step and (piece.sampling.needs_history or piece.sampling.grammar)
        else piece
        for piece in slices
    ]
