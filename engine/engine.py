"""One replica of a model, ready to compute: `Engine.execute` runs one step over any mix of slices.

Owns weights, KV memory and the order in which slices are laid out. Which sequences run, which blocks they have and when
to stop is the caller's business; the engine keeps nothing about a sequence that it could not do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from engine.attention import Attention, Geometry, Span, make_attention
from engine.batch import HiddenStates, Sampled, Slice
from engine.config import ModelConfig
from engine.cuda.graphs import with_graphs
from engine.cuda.placing import to_device
from engine.cuda.requirements import find_device
from engine.cuda.staging import HostStaging, StepStores
from engine.device import CPU, STAGED
from engine.drawn import BegunStep, Drawn, Fed, draw_from, with_history
from engine.grammar_masks import GrammarMasks
from engine.kernels import crew_of, make_kernels
from engine.kv_pool import TORCH_DTYPES, KvPool
from engine.model import ForwardPass, Model
from engine.stage import Stage, split
from engine.step import Step
from engine.tensor_parallel.team import Leading, Team
from engine.weights import Progress, load_weights
from protocol.errors import ConfigError, InvalidRequest
from protocol.ids import BlockId, RequestId
from protocol.layout import KvLayout
from protocol.layout import fingerprint as make_fingerprint

OnLayer = Callable[[int], None]


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
        outside: memoryview | None = None,
        grammars: GrammarMasks | None = None,
    ) -> None:
        """`outside`: where others reach the pool's KV, by way of `engine.staging`; None: in the pool itself."""
        self.config = config
        self.kernels_name = model.kernels_name
        self.attention_name = attention.name
        self.layout = pool.layout
        self.num_blocks = pool.num_blocks
        self.memory = pool.memory
        self.device = pool.device
        self.dtype = pool.dtype  # that the model is computed in
        self.fingerprint = fingerprint
        self.stage = stage or split(config.num_layers, 1)[0]
        self._model = model
        self._attention = attention
        self._pool = pool
        # The partly filled block behind which each sequence of the last step is known to be clean.
        self._clean_tails: dict[RequestId, BlockId] = {}
        self.team = team
        self.grammars = grammars
        self._leading: Leading | None = None
        self._drawn: Drawn | None = None  # by the step begun last
        self._feeds_on_device = model.kernels_name == "triton"
        self._outside = outside
        self._staging = self.make_staging() if outside is not None else None

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
        (`protocol.machine.cache_folder`); without a folder, or without a compiler, auto means torch. `device`: cpu,
        cuda, where auto means triton, or cpu-staged (`engine.device`); but for cpu the KV is in memory of the engine's
        own, and what is in `memory` goes there and comes from there by way of `make_staging`.

        `stage`: only these layers are loaded and have KV in `memory`; `config` and `layout` are the whole model's, as
        the fingerprint is, which is equal at all stages. `team`: only this rank's share is loaded, and of `memory`,
        which all ranks have, only its heads are written."""
        set_threads(num_threads)
        place = find_device(CPU if device == STAGED else device)
        is_staged = device == STAGED or (place.type == "cuda" and memory is not None)
        own = stage or split(config.num_layers, 1)[0]
        triton = place.type == "cuda" or "triton" in (kernels, attention)
        _require_possible(layout, own, team, apart=device != CPU, triton=triton)
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
        inside = None if is_staged else memory
        pool = KvPool(own_layout, num_blocks, inside, place, heads, dtype)
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
        outside = memory if is_staged else None
        grammars = GrammarMasks(
            model_path, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
        )
        return cls(config, model, backend, pool, identity, own, team, outside, grammars)

    @property
    def is_staged(self) -> bool:
        """Whether the KV that it computes from is not in the memory that it was given."""
        return self._outside is not None

    def make_staging(self) -> HostStaging:
        """A way of its own between the pool and the memory that `load` was given, for one caller."""
        assert self._outside is not None, "the pool is in that memory"
        return HostStaging(self._pool, self._outside)

    def lead(self, leading: Leading) -> None:
        """From now on the other ranks of the team are told each step."""
        self._leading = leading

    def execute(
        self,
        slices: Sequence[Slice],
        on_layer: OnLayer | None = None,
        *,
        before_attention: OnLayer | None = None,
        hidden: HiddenStates | None = None,
    ) -> list[Sampled | None]:
        """One forward pass over all slices. `on_layer(l)` is called when layer l's K and V of this step are in the
        memory that `load` was given: right after they were computed, or, where that is not the pool's, a little later.
        `before_attention(l)` is called after they were computed and before any of the layer's KV is looked at.
        The result has one entry per slice, None where it does not sample. Raises InvalidRequest, before
        anything is computed, for a slice that does not fit its blocks or the vocabulary.

        A stage takes hidden states from the one before and leaves some for the next one in `hidden`, and only the last
        one samples. Their rows are in the order of this engine's attention, which must be the same at all stages."""
        return self.begin(slices, on_layer, before_attention=before_attention, hidden=hidden).end()

    def begin(
        self,
        slices: Sequence[Slice],
        on_layer: OnLayer | None = None,
        *,
        before_attention: OnLayer | None = None,
        hidden: HiddenStates | None = None,
    ) -> BegunStep:
        """As `execute`, as far as a GPU is given it; what is sampled is waited for by `BegunStep.end`. Slices that
        follow the step begun before this one are fed where its tokens are. Of a CPU the step is over on return."""
        if not slices:
            return BegunStep((), (), draw_from(None, (), may_stay=False))
        for piece in slices:
            self._check(piece)
        order = self._attention.order([(piece.start, piece.end) for piece in slices])
        ordered = [slices[index] for index in order]
        sampling = [piece for piece in ordered if piece.samples] if self.stage.is_last else []
        if any(piece.follows for piece in sampling) and self._drawn is not None:
            sampling = with_history(sampling, self._drawn)
        masks = None if self.grammars is None else self.grammars.begin(sampling)
        with torch.inference_mode():
            step = self._make_step(ordered, hidden)
            dirty = self._find_dirty(ordered) if self._attention.reads_whole_blocks else None
            with self._hooks(ordered, on_layer, before_attention) as hook:
                if self._leading is None:
                    output = self.run(step, dirty, hook)
                else:
                    output = self._leading.run(self.run, step, dirty, hook)
            if self.stage.is_last:
                allowed = None if masks is None else masks.result()
                drawn = draw_from(output, sampling, allowed, may_stay=self._feeds_on_device)
            else:
                drawn = draw_from(None, (), may_stay=False)
                if hidden is not None and hidden.passed_on is not None:
                    self._rows_of(hidden.passed_on, len(output)).copy_(output)
        self._drawn = drawn
        return BegunStep(slices, order if sampling else (), drawn)

    @contextmanager
    def _hooks(
        self, slices: Sequence[Slice], on_layer: OnLayer | None, before_attention: OnLayer | None
    ) -> Iterator[OnLayer | None]:
        """What the forward pass calls after each layer's K and V. All of `on_layer` has been called at the end."""
        if on_layer is None or self._staging is None:
            yield _both(on_layer, before_attention)
            return
        stores = StepStores(self._staging, self._touched(slices), on_layer)
        try:
            yield _both(stores.computed, before_attention)
        finally:
            stores.finish()

    def _touched(self, slices: Sequence[Slice]) -> list[BlockId]:
        """The blocks that a step writes to, each once."""
        size = self.layout.block_size
        blocks = (s.block_table[s.start // size : self.layout.blocks_for(s.end)] for s in slices)
        return list(dict.fromkeys(chain.from_iterable(blocks)))

    def run(
        self,
        step: Step,
        dirty: torch.Tensor | None,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """A step that is checked and laid out: `execute` calls it, and a rank that does as another one says. `dirty`:
        slots to be zeroed before. What `ForwardPass.forward` gives."""
        with torch.inference_mode():
            if dirty is not None:
                self._pool.clear(dirty)
            return self._model.forward(step, on_layer)

    def _check(self, piece: Slice) -> None:
        capacity = len(piece.block_table) * self.layout.block_size
        known = piece.end if piece.follows else len(piece.token_ids)
        if not 0 <= piece.start < piece.end <= min(known, capacity):
            raise InvalidRequest(
                f"slice [{piece.start}, {piece.end}) of {len(piece.token_ids)} tokens "
                f"in blocks for {capacity}",
                request=piece.request_id,
            )
        if piece.sampling.grammar and self.grammars is None:
            raise InvalidRequest("this engine knows no grammars", request=piece.request_id)

    def _rows_of(self, memory: memoryview, num_tokens: int) -> torch.Tensor:
        """The first rows [tokens, hidden_size] of somebody's memory."""
        count = num_tokens * self.config.hidden_size
        flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[self.dtype], count=count)
        return flat.view(num_tokens, self.config.hidden_size)

    def _make_step(self, slices: Sequence[Slice], hidden: HiddenStates | None) -> Step:
        block_size = self.layout.block_size
        following = [index for index, piece in enumerate(slices) if piece.follows]
        on_device = self._drawn.on_device if following and self._drawn is not None else None
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
                token_ids.append(
                    0 if piece.follows and on_device is not None else self._first_token(piece)
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
            fed=None if on_device is None else self._fed(slices, following, on_device),
            hidden=self._given(hidden, len(token_ids)),
        )

    def _first_token(self, piece: Slice) -> int:
        if not piece.follows:
            return piece.token_ids[piece.start]
        if self._drawn is None:
            raise InvalidRequest("it follows no step", request=piece.request_id)
        return self._drawn.token_of(piece.request_id)

    def _fed(
        self, slices: Sequence[Slice], following: Sequence[int], on_device: torch.Tensor
    ) -> Fed:
        """Tokens that the step begun before has on the device."""
        assert self._drawn is not None, "somebody has them"
        ends = np.cumsum([piece.num_tokens for piece in slices])
        rows = [self._drawn.row_of(slices[index].request_id) for index in following]
        chosen = to_device(torch.tensor(rows), on_device.device)
        return Fed(torch.from_numpy(ends[following] - 1), on_device.index_select(0, chosen))

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


def _both(first: OnLayer | None, second: OnLayer | None) -> OnLayer | None:
    if first is None or second is None:
        return first or second

    def call(layer: int) -> None:
        first(layer)
        second(layer)

    return call


def _require_possible(
    layout: KvLayout, stage: Stage, team: Team | None, *, apart: bool, triton: bool
) -> None:
    """Raises ConfigError for what does not go together. `apart`: the KV is in memory of a device's own."""
    if stage.size > 1 and apart:
        raise ConfigError("a pipeline's stages compute on CPUs: --device cpu")
    if team is not None and (stage.size > 1 or apart):
        raise ConfigError("ranks share whole models, on CPUs: --device cpu")
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
