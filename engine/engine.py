"""Inference engine of one model replica: `Engine.execute` runs one step over any mix of prefill and decode slices.

Owns the weights, the KV memory and the order in which slices are laid out. The caller decides which sequences run,
which blocks they use and when they stop; the engine keeps no state about a sequence that it can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from engine.attention import Attention, Geometry, make_attention
from engine.batch import HiddenStates, Sampled, Slice
from engine.config import ModelConfig
from engine.cuda.graphs import with_graphs
from engine.cuda.requirements import find_device
from engine.cuda.staging import HostStaging
from engine.device import CPU, STAGED
from engine.drawn import BegunStep, draw, with_history
from engine.grammar_masks import GrammarMasks
from engine.kernels import crew_of, make_kernels
from engine.kv_pool import TORCH_DTYPES, KvPool
from engine.model import ForwardPass, Model
from engine.parts import Stage, split
from engine.sampler import score_prompts
from engine.step import Step
from engine.step_builder import StepBuilder
from engine.tensor_parallel.team import Leading, Team
from engine.weights import Progress, load_weights
from protocol.errors import ConfigError
from protocol.ids import BlockId
from protocol.layout import KvLayout
from protocol.layout import fingerprint as make_fingerprint

OnLayer = Callable[[int], None]


class Engine:
    """Runs forward passes and samples tokens. Not thread-safe: one caller at a time (`engine.runtime.EngineThread`)."""

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
        """`outside`: host memory to which `engine.staging` copies the pool's KV; None if the pool itself is shared."""
        self.config = config
        self.kernels_name = model.kernels_name
        self.attention_name = attention.name
        self.layout = pool.layout
        self.num_blocks = pool.num_blocks
        self.memory = pool.memory
        self.device = pool.device
        self.dtype = pool.dtype  # compute dtype
        self.fingerprint = fingerprint
        self.stage = stage or split(config.num_layers, 1)[0]
        self._model = model
        self._attention = attention
        self._pool = pool
        self.team = team
        self.grammars = grammars
        self._leading: Leading | None = None
        self._builder = StepBuilder(
            self.layout,
            self.stage,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            dtype=self.dtype,
            knows_grammars=grammars is not None,
        )
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
        """Loads the weights and creates the KV pool in `memory`, or in newly allocated memory if None. Raises
        ConfigError. `dtype` is the compute dtype; None means the layout's dtype, which must not be quantised then.
        `num_threads` is set for the whole process.

        `kernels` and `attention`: auto, native, torch or triton. Native code is compiled once into `cache_folder`
        (`protocol.machine.cache_folder`); without a folder, auto means torch. `device`: cpu, cuda (auto means triton)
        or cpu-staged (`engine.device`). On cuda and cpu-staged the KV pool is in the engine's own memory, and
        `make_staging` copies between it and `memory`.

        `stage`: only its layers are loaded and have KV in `memory`. `config` and `layout` describe the whole model, and
        so does the fingerprint, which is equal at all stages. `team`: only this rank's share of the weights is loaded,
        and only its heads are written to `memory`, which all ranks map."""
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
        geometry = Geometry(part.num_heads, part.num_kv_heads, part.head_dim)
        backend = make_attention(attention, geometry, pool, cache_folder, crew_of(layers))
        plain = Model(part, layers, backend, gives_logits=own.is_last, share=team)
        model = with_graphs(plain, config, pool)
        identity = make_fingerprint(weights.digest, layout, dtype)
        outside = memory if is_staged else None
        grammars = GrammarMasks(model_path, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)
        return cls(config, model, backend, pool, identity, own, team, outside, grammars)

    @property
    def is_staged(self) -> bool:
        """True if the engine computes from its own KV memory instead of the memory that it was given."""
        return self._outside is not None

    def make_staging(self) -> HostStaging:
        """Creates a copier between the pool and the memory given to `load`, for use by one caller."""
        assert self._outside is not None, "the pool is in that memory"
        return HostStaging(self._pool, self._outside)

    def lead(self, leading: Leading) -> None:
        """Makes this engine rank 0: each later step is sent to the other ranks of the team."""
        self._leading = leading

    def execute(
        self,
        slices: Sequence[Slice],
        on_layer: OnLayer | None = None,
        *,
        before_attention: OnLayer | None = None,
        hidden: HiddenStates | None = None,
    ) -> list[Sampled | None]:
        """Runs one forward pass over all slices and returns one entry per slice, None for a slice that does not sample.
        Raises InvalidRequest, before anything is computed, for a slice that does not fit its blocks or the vocabulary.

        `on_layer(l)` is called when this step's K and V of layer l are in the memory given to `load`: right after they
        are computed, or slightly later if they have to be copied out of the pool. `before_attention(l)` is called after
        they are computed and before the layer's attention reads any KV; not so in a team, which calls both at the end
        of the layer.

        A pipeline stage receives hidden states from the previous stage and leaves them for the next one in `hidden`;
        only the last stage samples. Rows are in the attention backend's order, which must be equal at all stages."""
        return self.begin(slices, on_layer, before_attention=before_attention, hidden=hidden).end()

    def begin(
        self,
        slices: Sequence[Slice],
        on_layer: OnLayer | None = None,
        *,
        before_attention: OnLayer | None = None,
        hidden: HiddenStates | None = None,
    ) -> BegunStep:
        """Starts a step with the arguments of `execute`; `BegunStep.end` returns its result. On a GPU, greedy tokens
        are not waited for, any other sampling waits for the logits; on a CPU the step is complete on return. Slices
        with `follows` take their token from the step begun before, on the device if it is still there."""
        if not slices:
            return BegunStep(0)
        for piece in slices:
            self._builder.check(piece)
        order = self._attention.order([(piece.start, piece.end) for piece in slices])
        ordered = [slices[index] for index in order]
        places = [at for at in order if slices[at].samples] if self.stage.is_last else []
        sampling = [slices[at] for at in places]
        if any(piece.follows for piece in sampling) and self._builder.before is not None:
            sampling = with_history(sampling, self._builder.before)
        masks = None if self.grammars is None else self.grammars.begin(sampling)
        with torch.inference_mode():
            step = self._builder.build(ordered, hidden)
            dirty = self._builder.find_dirty(ordered) if self._attention.reads_whole_blocks else None
            with self._hooks(ordered, on_layer, before_attention) as hook:
                if self._leading is None:
                    output = self.run(step, dirty, hook)
                else:
                    output = self._leading.run(self.run, step, dirty, hook)
            if self.stage.is_last:
                allowed = None if masks is None else masks.result()
                output = score_prompts(output, ordered)
                stays = self._feeds_on_device
                begun = draw(len(slices), places, sampling, output, allowed, may_stay=stays)
            else:
                begun = BegunStep(len(slices))
                if hidden is not None and hidden.passed_on is not None:
                    self._builder.rows_of(hidden.passed_on, len(output)).copy_(output)
                    if hidden.on_passed is not None:
                        hidden.on_passed()
        self._builder.before = begun
        return begun

    @contextmanager
    def _hooks(
        self, slices: Sequence[Slice], on_layer: OnLayer | None, before_attention: OnLayer | None
    ) -> Iterator[OnLayer | None]:
        """Yields the callback for the forward pass to call per layer. On exit every `on_layer` call has been made."""
        if on_layer is None or self._staging is None:
            yield _both(on_layer, before_attention)
            return
        staging, blocks = self._staging, self._touched(slices)

        def computed(layer: int) -> None:
            # The layer is in the pool, or will be once the GPU has done the submitted work.
            staging.store(layer, blocks, partial(on_layer, layer))
            staging.settle(wait=False)

        try:
            yield _both(computed, before_attention)
        finally:
            staging.settle(wait=True)

    def _touched(self, slices: Sequence[Slice]) -> list[BlockId]:
        """Returns the blocks that a step writes to, without duplicates."""
        size = self.layout.block_size
        blocks = (s.block_table[s.start // size : self.layout.blocks_for(s.end)] for s in slices)
        return list(dict.fromkeys(chain.from_iterable(blocks)))

    def run(
        self,
        step: Step,
        dirty: torch.Tensor | None,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """Runs a step that is already checked and laid out, and returns the result of `ForwardPass.forward`. Called by
        `begin` and by a rank that follows rank 0. `dirty`: slots to zero beforehand."""
        with torch.inference_mode():
            if dirty is not None:
                self._pool.clear(dirty)
            return self._model.forward(step, on_layer)


def _both(first: OnLayer | None, second: OnLayer | None) -> OnLayer | None:
    if first is None or second is None:
        return first or second

    def call(layer: int) -> None:
        first(layer)
        second(layer)

    return call


def _require_possible(layout: KvLayout, stage: Stage, team: Team | None, *, apart: bool, triton: bool) -> None:
    """Raises ConfigError for unsupported combinations. `apart`: the KV is in a device's own memory."""
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
    """Sets the number of threads of torch's operations for the whole process."""
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        # torch refuses this once work has begun in the process; idle threads do no harm.
        with suppress(RuntimeError):
            torch.set_num_interop_threads(1)
