"""What a step that was begun has sampled: on the host, or still on the device, where the next step can have it already.

A greedy token is the place of a row's largest logit, which the device finds by itself; its copy to the host is asked
for and not waited for. Any other sampling is the host's (`engine.sampler`), which waits for the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.batch import Sampled, Slice
from engine.cuda.placing import to_device
from engine.cuda.streams import Event, record_event
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


class Drawn(Protocol):
    """The tokens of one step."""

    def result(self) -> list[Sampled]:
        """One per slice that samples; waits for them."""

    def token_of(self, request_id: RequestId) -> int:
        """On the host; waits for it. Raises InvalidRequest where the step sampled none for the request."""

    @property
    def on_device(self) -> torch.Tensor | None:
        """[slices that sample] int64; None: they are on the host."""

    def row_of(self, request_id: RequestId) -> int:
        """Raises InvalidRequest where the step sampled none for the request."""


def draw_from(
    logits: torch.Tensor | None,
    slices: Sequence[Slice],
    allowed: Sequence[Allowed | None] | None = None,
    *,
    may_stay: bool,
) -> Drawn:
    """`slices`: those that sample, a row of `logits` each (None where there is none). `allowed`: as for `sample`.
    `may_stay`: greedy tokens may stay on the device for now."""
    if logits is None or not slices:
        return OnHost(())
    if may_stay and is_greedy_alone(slices):
        return OnDevice(logits.argmax(dim=-1), slices)
    return OnHost(sample(logits, slices, allowed))


class OnHost:
    """`Drawn` that is known."""

    on_device: torch.Tensor | None = None

    def __init__(self, sampled: Sequence[Sampled]) -> None:
        self._sampled = list(sampled)

    def result(self) -> list[Sampled]:
        return self._sampled

    def token_of(self, request_id: RequestId) -> int:
        return self._sampled[self.row_of(request_id)].token_id

    def row_of(self, request_id: RequestId) -> int:
        return _row_of(request_id, [each.request_id for each in self._sampled])


class OnDevice:
    """`Drawn` that is on its way."""

    def __init__(self, tokens: torch.Tensor, slices: Sequence[Slice]) -> None:
        self.on_device: torch.Tensor | None = tokens
        self._request_ids = [piece.request_id for piece in slices]
        is_cuda = tokens.device.type == "cuda"
        self._on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=is_cuda)
        self._on_host.copy_(tokens, non_blocking=True)
        self._arrived: Event | None = record_event() if is_cuda else None

    def result(self) -> list[Sampled]:
        if self._arrived is not None:
            self._arrived.synchronize()
        pairs = zip(self._request_ids, self._on_host.tolist(), strict=True)
        return [Sampled(request_id=name, token_id=token) for name, token in pairs]

    def token_of(self, request_id: RequestId) -> int:
        return self.result()[self.row_of(request_id)].token_id

    def row_of(self, request_id: RequestId) -> int:
        return _row_of(request_id, self._request_ids)


def _row_of(request_id: RequestId, among: Sequence[RequestId]) -> int:
    try:
        return among.index(request_id)
    except ValueError:
        raise InvalidRequest(
            "the step before sampled no token for it to follow", request=request_id
        ) from None


def with_history(slices: Sequence[Slice], before: Drawn) -> list[Slice]:
    """Where sampling looks at a sequence's tokens, and the last one may not be among them yet, with it. Such a token is
    on the host already: it was sampled there, for the same reason."""
    return [
        replace(
            piece, token_ids=[*piece.token_ids[: piece.start], before.token_of(piece.request_id)]
        )
        if piece.follows and (piece.sampling.needs_history or piece.sampling.grammar)
        else piece
        for piece in slices
    ]


class BegunStep:
    """A step that an engine was given. Steps end in the order in which they were begun."""

    def __init__(self, slices: Sequence[Slice], order: Sequence[int], drawn: Drawn) -> None:
        """`order`: in which the slices that sample were computed."""
        self._slices = slices
        self._order = order
        self._drawn = drawn

    def end(self) -> list[Sampled | None]:
        """As `Engine.execute`; waits until the device has come so far."""
        drawn = iter(self._drawn.result())
        results: list[Sampled | None] = [None] * len(self._slices)
        for index in self._order:
            if self._slices[index].samples:
                results[index] = next(drawn)
        return results
