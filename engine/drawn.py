"""What a step that was begun has sampled: on the host, or still on the device, where the next step can have it already.

A greedy token is the place of a row's largest logit, which the device finds by itself; its copy to the host is asked
for and not waited for. Any other sampling is the host's (`engine.sampler`), which waits for the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.batch import Sampled, Slice
from engine.cuda.streams import Event, record_event, to_device
from engine.grammar_masks import Allowed
from engine.sampler import is_greedy_alone, sample
from protocol.errors import InvalidRequest
from protocol.ids import RequestId


@dataclass(frozen=True, slots=True)
class Fed:
    """Tokens of a step that are on its device only."""

    places: torch.Tensor  # [k] int64, on the host: which of the step's tokens they are
    tokens: torch.Tensor  # [k] int64, on the device

    def put_into(self, token_ids: torch.Tensor) -> None:
        """`token_ids`: of the whole step, on the device."""
        token_ids.index_copy_(0, to_device(self.places, token_ids.device), self.tokens)


class BegunStep:
    """A step that an engine was given, and what it samples. Steps end in the order in which they were begun."""

    def __init__(
        self,
        num_slices: int,
        places: Sequence[int] = (),
        sampled: Sequence[Sampled] = (),
        *,
        following: Sequence[RequestId] = (),
        on_device: torch.Tensor | None = None,
    ) -> None:
        """`places`: which of the slices sampled each. `on_device`: greedy tokens [places] int64 of the requests
        `following`, in place of `sampled`, where they are still on the device."""
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
        """As `Engine.execute`; waits until the device has come so far."""
        results: list[Sampled | None] = [None] * self._num_slices
        for place, sampled in zip(self._places, self._drawn(), strict=True):
            results[place] = sampled
        return results

    def token_of(self, request_id: RequestId) -> int:
        """On the host; waits for it. Raises InvalidRequest where the step sampled none for the request."""
        return self._drawn()[self.row_of(request_id)].token_id

    def row_of(self, request_id: RequestId) -> int:
        """Which of the tokens is the request's. Raises InvalidRequest where the step sampled none for it."""
        if request_id not in self._request_ids:
            raise InvalidRequest("the step before sampled no token for it to follow", request=request_id)
        return self._request_ids.index(request_id)

    def _drawn(self) -> Sequence[Sampled]:
        if self.on_device is None:
            return self._sampled
        if self._arrived is not None:
            self._arrived.synchronize()
        pairs = zip(self._request_ids, self._on_host.tolist(), strict=True)
        return [Sampled(request_id=name, token_id=token) for name, token in pairs]


def draw(
    num_slices: int,
    places: Sequence[int],
    sampling: Sequence[Slice],
    logits: torch.Tensor,
    allowed: Sequence[Allowed | None] | None,
    *,
    may_stay: bool,
) -> BegunStep:
    """`sampling`: the slices at `places`, a row of `logits` each. `allowed`: as for `sample`. `may_stay`: greedy tokens
    may stay on the device for now."""
    if not sampling:
        return BegunStep(num_slices)
    if may_stay and is_greedy_alone(sampling):
        names = [piece.request_id for piece in sampling]
        best = logits.argmax(dim=-1)
        return BegunStep(num_slices, places, following=names, on_device=best)
    return BegunStep(num_slices, places, sample(logits, sampling, allowed))


def with_history(slices: Sequence[Slice], before: BegunStep) -> list[Slice]:
    """Where sampling looks at a sequence's tokens, and the last one may not be among them yet, with it. Such a token is
    on the host already: it was sampled there, for the same reason."""
    return [
        replace(piece, token_ids=[*piece.token_ids[: piece.start], before.token_of(piece.request_id)])
        if piece.follows and (piece.sampling.needs_history or piece.sampling.grammar)
        else piece
        for piece in slices
    ]
