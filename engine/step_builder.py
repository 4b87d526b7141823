"""The way from slices to a step: what is laid out where, and what of it cannot be.

Knows which tokens the step begun before has drawn, and in which blocks nothing needs clearing any more; nothing else
about a sequence outlives a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention import Span
from engine.batch import HiddenStates, Slice
from engine.cuda.streams import to_device
from engine.drawn import BegunStep, Fed
from engine.kv_pool import TORCH_DTYPES
from engine.parts import Stage
from engine.sampler import num_scored
from engine.step import Step
from protocol.errors import InvalidRequest
from protocol.ids import BlockId, RequestId
from protocol.layout import KvLayout


class StepBuilder:
    """Of one engine."""

    def __init__(
        self,
        layout: KvLayout,
        stage: Stage,
        *,
        vocab_size: int,
        hidden_size: int,
        dtype: str,
        knows_grammars: bool,
    ) -> None:
        self.before: BegunStep | None = None
        """The step begun last; the engine sets it."""
        self._layout = layout
        self._stage = stage
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._dtype = TORCH_DTYPES[dtype]
        self._knows_grammars = knows_grammars
        # The partly filled block behind which each sequence of the last step is known to be clean.
        self._clean_tails: dict[RequestId, BlockId] = {}

    def check(self, piece: Slice) -> None:
        """Raises InvalidRequest for what does not fit its blocks, or cannot be sampled here."""
        capacity = len(piece.block_table) * self._layout.block_size
        known = piece.end if piece.follows else len(piece.token_ids)
        if not 0 <= piece.start < piece.end <= min(known, capacity):
            raise InvalidRequest(
                f"slice [{piece.start}, {piece.end}) of {len(piece.token_ids)} tokens in blocks for {capacity}",
                request=piece.request_id,
            )
        if piece.sampling.grammar and not self._knows_grammars:
            raise InvalidRequest("this engine knows no grammars", request=piece.request_id)

    def build(self, slices: Sequence[Slice], hidden: HiddenStates | None) -> Step:
        """Raises InvalidRequest for a token that the vocabulary does not have."""
        block_size = self._layout.block_size
        following = [index for index, piece in enumerate(slices) if piece.follows]
        on_device = self.before.on_device if following and self.before is not None else None
        spans: list[Span] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for piece in slices:
            num_blocks = self._layout.blocks_for(piece.end)
            blocks = np.asarray(piece.block_table[:num_blocks], dtype=np.int64)
            spans.append(Span(piece.start, piece.end, blocks, piece.num_prompt_tokens))
            if piece.num_tokens == 1:  # one array would cost more than all of this
                block = piece.block_table[piece.start // block_size]
                token_ids.append(0 if piece.follows and on_device is not None else self._first_token(piece))
                positions.append(piece.start)
                slots.append(block * block_size + piece.start % block_size)
                continue
            own = np.arange(piece.start, piece.end)
            token_ids.extend(piece.token_ids[piece.start : piece.end])
            positions.extend(own.tolist())
            slots.extend((blocks[own // block_size] * block_size + own % block_size).tolist())
        tokens = torch.tensor(token_ids)
        self._check_vocabulary(tokens)
        return Step(
            token_ids=tokens,
            positions=torch.tensor(positions),
            longest=max(piece.end for piece in slices),
            slots=torch.tensor(slots),
            spans=spans,
            rows=_rows(slices, len(token_ids)),
            fed=None if on_device is None else self._fed(slices, following, on_device),
            hidden=self._given(hidden, len(token_ids)),
        )

    def _first_token(self, piece: Slice) -> int:
        if not piece.follows:
            return piece.token_ids[piece.start]
        if self.before is None:
            raise InvalidRequest("it follows no step", request=piece.request_id)
        return self.before.token_of(piece.request_id)

    def _fed(self, slices: Sequence[Slice], following: Sequence[int], on_device: torch.Tensor) -> Fed:
        """Tokens that the step begun before has on the device."""
        assert self.before is not None, "somebody has them"
        ends = np.cumsum([piece.num_tokens for piece in slices])
        rows = [self.before.row_of(slices[index].request_id) for index in following]
        chosen = to_device(torch.tensor(rows), on_device.device)
        return Fed(torch.from_numpy(ends[following] - 1), on_device.index_select(0, chosen))

    def _given(self, hidden: HiddenStates | None, num_tokens: int) -> torch.Tensor | None:
        if self._stage.is_first:
            return None
        if hidden is None or hidden.fetch is None:
            raise ValueError("a stage behind the first one computes from hidden states")
        return self.rows_of(hidden.fetch(), num_tokens)

    def _check_vocabulary(self, tokens: torch.Tensor) -> None:
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequest(f"token ids from {low} to {high} do not fit a vocabulary of {self._vocab_size}")

    def rows_of(self, memory: memoryview, num_tokens: int) -> torch.Tensor:
        """The first rows [tokens, hidden_size] of somebody's memory."""
        count = num_tokens * self._hidden_size
        flat = torch.frombuffer(memory, dtype=self._dtype, count=count)
        return flat.view(num_tokens, self._hidden_size)

    def find_dirty(self, slices: Sequence[Slice]) -> torch.Tensor | None:
        """What lies behind single tokens in their last block, for attention that reads whole blocks and masks what is
        not there yet: what an earlier holder or a corrupted transfer left must not be a NaN: 0 · NaN is NaN. Once
        clean, a tail stays so while its sequence grows into it."""
        block_size = self._layout.block_size
        clean: dict[RequestId, BlockId] = {}
        dirty: list[np.ndarray] = []
        for piece in slices:
            if piece.end - piece.start > 1:
                continue
            block = piece.block_table[piece.start // block_size]
            clean[piece.request_id] = block
            if self._clean_tails.get(piece.request_id) != block:
                first = block * block_size + piece.start % block_size
                dirty.append(np.arange(first, (block + 1) * block_size))
        self._clean_tails = clean
        return torch.from_numpy(np.concatenate(dirty)) if dirty else None


def _rows(slices: Sequence[Slice], num_tokens: int) -> torch.Tensor | None:
    """Tokens whose logits score the prompt's, and the last one of each slice that samples; None when that is all."""
    rows: list[int] = []
    end = 0
    for piece in slices:
        rows.extend(range(end, end + num_scored(piece)))
        end += piece.num_tokens
        if piece.samples:
            rows.append(end - 1)
    return None if len(rows) == num_tokens else torch.tensor(rows, dtype=torch.int64)
