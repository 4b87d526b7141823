"""One replica of a model, ready to compute: `Engine.execute` runs one step over any mix of slices.

Owns weights, KV memory and the order in which slices are laid out. Which sequences run, which blocks they have and when
to stop is the caller's business; the engine keeps nothing about a sequence that it could not do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from engine.attention import Attention, Geometry, Span, make_attention
from engine.batch import HiddenStates, Sampled, Slice
from engine.config import ModelConfig
from engine.cuda.graphs import with_graphs
from engine.cuda.requirements import find_device
from engine.kernels import crew_of, make_kernels
from engine.kv_pool import TORCH_DTYPES, KvPool
from engine.model import ForwardPass, Model
from engine.sampler import sample
from engine.stage import Stage, split
from engine.step import Step
from engine.tensor_parallel.team import Leading, Team
from engine.weights import Progress, load_weights
from protocol.errors import ConfigError, InvalidRequest
from protocol.ids import BlockId, RequestId
from protocol.layout import KvLayout
from protocol.layout import fingerprint as make_fingerprint


class Engine:
    """Not thread-safe: one caller at a time (`engine.runtime.EngineThread`)."""

    def __init__(
        self,
        config: ModelConfig,
        model: ForwardPass,
        attention: Attention,
        pool: KvPool,
        fingerprint: str,
        stage: Stage | None = None,
        team: Team | None = None,
    ) -> None:
        self.config = config
        self.kernels_name = model.kernels_name
        self.attention_name = attention.name
        self.layout = pool.layout
        self.num_blocks = pool.num_blocks
        self.memory = pool.memory
        self.dtype = pool.dtype  # that the model is computed in
        self.fingerprint = fingerprint
        self.stage = stage or split(config.num_layers, 1)[0]
        self._model = model
        self._attention = attention
        self._pool = pool
        # The partly filled block behind which each sequence of the last step is known to be clean.
        self._clean_tails: dict[RequestId, BlockId] = {}
        self.team = team
        self._leading: Leading | None = None

    @classmethod
    def load(
        cls,
        model_path: Path,
        *,
        config: ModelConfig,
        layout: KvLayout,
        num_blocks: int,
        memory: memoryview | None = None,
        stage: Stage | None = None,
        team: Team | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        num_threads: int = 1,
        load_format: str = "auto",
        kernels: str = "auto",
        attention: str = "auto",
        cache_folder: Path | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Loads the weights and lays the KV pool out over `memory` (its own when None). `dtype` is what is
        computed in; None = the layout's, which is then not quantised. Raises ConfigError. `num_threads` is set for the
        whole process.

        `kernels` and `attention`: auto, native or torch. What is native is compiled once into `cache_folder`
        (`protocol.machine.cache_folder`); without a folder, or without a compiler, auto means torch. `device`: cpu or
        cuda, where auto means triton, and `memory` does not hold the KV: nobody may hand it over from there.

        `stage`: only these layers are loaded and have KV in `memory`; `config` and `layout` are the whole model's, as
        the fingerprint is, which is equal at all stages. `team`: only this rank's share is loaded, and of `memory`,
        which all ranks have, only its heads are written."""
        set_threads(num_threads)
        place = find_device(device)
        own = stage or split(config.num_layers, 1)[0]
        triton = place.type == "cuda" or "triton" in (kernels, attention)
        _require_possible(layout, own, team, on_cuda=place.type == "cuda", triton=triton)
        shard = None if team is None else team.shard
        dtype = dtype or layout.dtype
        weights = load_weights(
            model_path,
            config,
            TORCH_DTYPES[dtype],
            load_format=load_format,
            progress=progress,
            device=place,
            stage=own,
            shard=shard,
        )
        config = config.of_layers(own.layers)
        part, heads = (config, None) if shard is None else (shard.of(config), shard.kv_heads)
        own_layout = layout.of_layers(config.num_layers)
        pool = KvPool(own_layout, num_blocks, memory, place, heads, dtype)
        layers = make_kernels(
            kernels,
            part,
            weights,
            pool,
            num_threads=num_threads,
            cache_folder=cache_folder,
            compiling=partial(_tell_compiling, progress),
            sums=None if team is None else team.ranks,
        )
        if attention == "auto" and layers.name == "torch":
            attention = "torch" if kernels == "auto" else attention  # why not was told already
        geometry = Geometry(part.num_heads, part.num_kv_heads, part.head_dim)
        backend = make_attention(attention, geometry, pool, cache_folder, crew_of(layers))
        plain = Model(part, layers, backend, gives_logits=own.is_last, share=team)
        model = with_graphs(plain, config, pool)
        identity = make_fingerprint(weights.digest, layout, dtype)
        return cls(config, model, backend, pool, identity, own, team)

    def lead(self, leading: Leading) -> None:
        """From now on the other ranks of the team are told each step."""
        self._leading = leading

    def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        hidden: HiddenStates | None = None,
    ) -> list[Sampled | None]:
        """One forward pass over all slices. `on_layer(l)` is called right after layer l's K and V of this step are in
        the pool. The result has one entry per slice, None where it does not sample. Raises InvalidRequest, before
        anything is computed, for a slice that does not fit its blocks or the vocabulary.

        A stage takes hidden states from the one before and leaves some for the next one in `hidden`, and only the last
        one samples. Their rows are in the order of this engine's attention, which must be the same at all stages."""
        if not slices:
            return []
        for piece in slices:
            self._check(piece)
        order = self._attention.order([(piece.start, piece.end) for piece in slices])
        ordered = [slices[index] for index in order]
        sampling = [piece for piece in ordered if piece.samples]
        with torch.inference_mode():
            step = self._make_step(ordered, hidden)
            dirty = self._find_dirty(ordered) if self._attention.reads_whole_blocks else None
            if self._leading is None:
                output = self.run(step, dirty, on_layer)
            else:
                output = self._leading.run(self.run, step, dirty, on_layer)
            if not self.stage.is_last:
                if hidden is not None and hidden.passed_on is not None:
                    self._rows_of(hidden.passed_on, len(output)).copy_(output)
                return [None] * len(slices)
            sampled = iter(sample(output, sampling) if sampling else ())
        results: list[Sampled | None] = [None] * len(slices)
        for index in order:
            if slices[index].samples:
                results[index] = next(sampled)
        return results

    def run(
        self,
        step: Step,
        dirty: torch.Tensor | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """A step that is checked and laid out: `execute` calls it, and a rank that does as another one says. `dirty`:
        slots to be zeroed before. What `ForwardPass.forward` gives."""
        with torch.inference_mode():
            if dirty is not None:
                self._pool.clear(dirty)
            return self._model.forward(step, on_layer)

    def _check(self, piece: Slice) -> None:
        capacity = len(piece.block_table) * self.layout.block_size
        if not 0 <= piece.start < piece.end <= min(len(piece.token_ids), capacity):
            raise InvalidRequest(
                f"slice [{piece.start}, {piece.end}) of {len(piece.token_ids)} tokens "
                f"in blocks for {capacity}",
                request=piece.request_id,
            )

    def _rows_of(self, memory: memoryview, num_tokens: int) -> torch.Tensor:
        """The first rows [tokens, hidden_size] of somebody's memory."""
        count = num_tokens * self.config.hidden_size
        flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[self.dtype], count=count)
        return flat.view(num_tokens, self.config.hidden_size)

    def _make_step(self, slices: Sequence[Slice], hidden: HiddenStates | None) -> Step:
        block_size = self.layout.block_size
        spans: list[Span] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for piece in slices:
            num_blocks = self.layout.blocks_for(piece.end)
            blocks = np.asarray(piece.block_table[:num_blocks], dtype=np.int64)
            spans.append(Span(piece.start, piece.end, blocks))
            if piece.num_tokens == 1:  # one array would cost more than all of this
                block = piece.block_table[piece.start // block_size]
                token_ids.append(piece.token_ids[piece.start])
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
            hidden=self._given(hidden, len(token_ids)),
        )

    def _given(self, hidden: HiddenStates | None, num_tokens: int) -> torch.Tensor | None:
        if self.stage.is_first:
            return None
        if hidden is None or hidden.fetch is None:
            raise ValueError("a stage behind the first one computes from hidden states")
        return self._rows_of(hidden.fetch(), num_tokens)

    def _check_vocabulary(self, tokens: torch.Tensor) -> None:
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise InvalidRequest(
                f"token ids from {low} to {high} do not fit a vocabulary of {self.config.vocab_size}"
            )

    def _find_dirty(self, slices: Sequence[Slice]) -> torch.Tensor | None:
        """What lies behind single tokens in their last block, for attention that reads whole blocks and masks what is
        not there yet: what an earlier holder or a corrupted transfer left must not be a NaN: 0 · NaN is NaN. Once
        clean, a tail stays so while its sequence grows into it."""
        block_size = self.layout.block_size
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
    """The last token of each slice that samples; None when that is every token."""
    ends = np.cumsum([piece.end - piece.start for piece in slices])
    rows = [int(end) - 1 for end, piece in zip(ends, slices, strict=True) if piece.samples]
    return None if len(rows) == num_tokens else torch.tensor(rows, dtype=torch.int64)


def _require_possible(
    layout: KvLayout, stage: Stage, team: Team | None, *, on_cuda: bool, triton: bool
) -> None:
    """Raises ConfigError for what does not go together."""
    if stage.size > 1 and on_cuda:
        raise ConfigError("a pipeline's stages compute on CPUs")
    if team is not None and (stage.size > 1 or on_cuda):
        raise ConfigError("ranks share whole models, on CPUs")
    if layout.is_quantised and triton:
        raise ConfigError(f"KV in {layout.dtype} is for CPUs: the Triton kernels do not read it")


def _tell_compiling(progress: Progress | None) -> None:
    if progress is not None:
        progress("compiling kernels", 0.0)


def set_threads(num_threads: int) -> None:
    """Threads of torch's operations, for the whole process."""
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        # Refused once work has begun in this process; idle threads do no harm.
        with suppress(RuntimeError):
            torch.set_num_interop_threads(1)
