"""Validates slices and lays them out as the tensors of a `Step`.

Keeps two facts across steps: the tokens sampled by the step begun last, and which partly filled blocks are already
clean. Nothing else about a sequence outlives a step.
"""

from collections.abc import Sequence

import numpy as np
import torch

from moonserve.engine.cuda.streams import to_device
from moonserve.engine.kernels import DeviceTokens, Span, Step
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES
from moonserve.engine.model.batch import HiddenStates, Slice
from moonserve.engine.model.partition import Stage
from moonserve.engine.model.pending_step import PendingStep
from moonserve.engine.model.sampler import num_scored
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.request import BlockId, RequestId


class StepBuilder:
    """Builds the steps of one engine."""

    def __init__(
        self,
        layout: KvLayout,
        stage: Stage,
        *,
        vocab_size: int,
        hidden_size: int,
        dtype: str,
        supports_grammars: bool,
    ) -> None:
        self.previous_step: PendingStep | None = None
        """The step begun last; set by the engine."""
        self._layout = layout
        self._stage = stage
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._dtype = TORCH_DTYPES[dtype]
        self._supports_grammars = supports_grammars
        # Last block of each single-token sequence of the last step; its slots behind the sequence's end are clean.
        self._clean_tails: dict[RequestId, BlockId] = {}

    def check(self, piece: Slice) -> None:
        """Raises InvalidRequest for a slice that does not fit its blocks or has a grammar that is not supported."""
        capacity = len(piece.block_table) * self._layout.block_size
        known = piece.end if piece.token_from_previous_step else len(piece.token_ids)
        if not 0 <= piece.start < piece.end <= min(known, capacity):
            raise InvalidRequest(
                f"slice [{piece.start}, {piece.end}) of {len(piece.token_ids)} tokens in blocks for {capacity}",
                request=piece.request_id,
            )
        if piece.sampling.grammar and not self._supports_grammars:
            raise InvalidRequest("this engine does not support grammars", request=piece.request_id)

    def build(self, slices: Sequence[Slice], hidden: HiddenStates | None) -> Step:
        """Returns the step for these slices. Raises InvalidRequest for a token id outside the vocabulary."""
        block_size = self._layout.block_size
        following = [index for index, piece in enumerate(slices) if piece.token_from_previous_step]
        on_device = self.previous_step.on_device if following and self.previous_step is not None else None
        spans: list[Span] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for piece in slices:
            num_blocks = self._layout.blocks_for(piece.end)
            blocks = np.asarray(piece.block_table[:num_blocks], dtype=np.int64)
            spans.append(Span(piece.start, piece.end, blocks, piece.num_prompt_tokens))
            if piece.num_tokens == 1:  # cheaper than creating an array
                block = piece.block_table[piece.start // block_size]
                token_ids.append(
                    0 if piece.token_from_previous_step and on_device is not None else self._first_token(piece)
                )
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
            device_tokens=None if on_device is None else self._device_tokens(slices, following, on_device),
            hidden=self._given(hidden, len(token_ids)),
        )

    def _first_token(self, piece: Slice) -> int:
        if not piece.token_from_previous_step:
            return piece.token_ids[piece.start]
        if self.previous_step is None:
            raise InvalidRequest("the request follows a step, but no step was begun", request=piece.request_id)
        return self.previous_step.token_of(piece.request_id)

    def _device_tokens(
        self, slices: Sequence[Slice], following: Sequence[int], on_device: torch.Tensor
    ) -> DeviceTokens:
        """Returns the tokens that the step begun last left on the device."""
        assert self.previous_step is not None, "the tokens are from a previous step"
        ends = np.cumsum([piece.num_tokens for piece in slices])
        rows = [self.previous_step.row_of(slices[index].request_id) for index in following]
        chosen = to_device(torch.tensor(rows), on_device.device)
        return DeviceTokens(torch.from_numpy(ends[following] - 1), on_device.index_select(0, chosen))

    def _given(self, hidden: HiddenStates | None, num_tokens: int) -> torch.Tensor | None:
        if self._stage.is_first:
            return None
        if hidden is None or hidden.fetch is None:
            raise ValueError("a stage after the first one needs hidden states")
        return self.rows_of(hidden.fetch(), num_tokens)

    def _check_vocabulary(self, tokens: torch.Tensor) -> None:
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self._vocab_size:
            raise InvalidRequest(f"token ids from {low} to {high} do not fit a vocabulary of {self._vocab_size}")

    def rows_of(self, memory: memoryview, num_tokens: int) -> torch.Tensor:
        """Returns a view of the first rows [tokens, hidden_size] of `memory`."""
        count = num_tokens * self._hidden_size
        flat = torch.frombuffer(memory, dtype=self._dtype, count=count)
        return flat.view(num_tokens, self._hidden_size)

    def find_dirty_slots(self, slices: Sequence[Slice]) -> torch.Tensor | None:
        """Returns the slots from each single token to the end of its block, if they are not known to be clean.

        For attention that reads whole blocks and masks the rest: a NaN left by an earlier holder or a corrupted
        transfer would survive the mask, since 0 · NaN is NaN. A clean tail stays clean while its sequence grows."""
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
    """Returns the rows whose logits are needed: prompt tokens to be scored, draft tokens, and the last other token of
    each sampling slice; None if these are all rows."""
    rows: list[int] = []
    end = 0
    for piece in slices:
        rows.extend(range(end, end + num_scored(piece)))
        end += piece.num_tokens
        if piece.samples:
            rows.extend(range(end - 1 - piece.num_draft, end))
    return None if len(rows) == num_tokens else torch.tensor(rows, dtype=torch.int64)
