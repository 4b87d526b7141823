"""Inference engine of one model replica: `Engine.execute` runs one step over any mix of prefill and decode slices.

Owns the weights, the KV memory and the order in which slices are laid out. The caller decides which sequences run,
which blocks they use and when they stop; the engine keeps no state about a sequence that it can do without.
`EngineThread` runs an engine for an event loop.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch

from moonserve.engine.cuda.block_copier import BlockCopier
from moonserve.engine.cuda.device import CPU, STAGED, find_device
from moonserve.engine.cuda.graphs import with_graphs
from moonserve.engine.cuda.staging import InPlace, Staging, StagingThread, run_uninterrupted
from moonserve.engine.kernels import Geometry, Step, StepOrder
from moonserve.engine.kernels.selector import (
    TRANSFORMERS,
    exact_rows,
    keeps_integers,
    make_attention,
    make_kernels,
    thread_pool_of,
)
from moonserve.engine.kernels.shared_cores import SharedCores
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES, KvTensors
from moonserve.engine.model.batch import HiddenStates, Sampled, Slice
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.forward_pass import ForwardPass, Model
from moonserve.engine.model.grammar_masks import GrammarMasks
from moonserve.engine.model.partition import Stage, split_into_stages
from moonserve.engine.model.pending_step import PendingStep, sample_step, with_draft_rows, with_history
from moonserve.engine.model.sampler import score_prompts
from moonserve.engine.model.step_builder import StepBuilder
from moonserve.engine.model.weights import Progress, load_weights
from moonserve.engine.tensor_parallel import RankGroup, StepLeader
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.kv_blocks import fingerprint as make_fingerprint
from moonserve.protocol.request import BlockId, SamplingParams

OnLayer = Callable[[int], None]
T = TypeVar("T")


class Engine:
    """Runs forward passes and samples tokens. Not thread-safe: one caller at a time (`engine.engine.EngineThread`)."""

    def __init__(
        self,
        config: ModelConfig,
        model: ForwardPass,
        attention: StepOrder,
        pool: KvTensors,
        fingerprint: str,
        stage: Stage | None = None,
        rank_group: RankGroup | None = None,
        host_memory: memoryview | None = None,
        grammars: GrammarMasks | None = None,
        shared_cores: SharedCores | None = None,
    ) -> None:
        """`host_memory`: host memory to which `engine.cuda.staging` copies the pool's KV; None if the pool itself is
        shared."""
        self.config = config
        self.kernels_name = model.kernels_name
        self.attention_name = attention.name
        self.exact_rows = exact_rows(model.kernels_name, attention.name)  # of a step (selector.py)
        self.layout = pool.layout
        self.num_blocks = pool.num_blocks
        self.memory = pool.memory
        self.device = pool.device
        self.dtype = pool.dtype  # compute dtype
        self.fingerprint = fingerprint
        self.stage = stage or split_into_stages(config.num_layers, 1)[0]
        self._model = model
        self._computing: AbstractContextManager[None] = shared_cores or nullcontext()
        self._attention = attention
        self._pool = pool
        self.rank_group = rank_group
        self.grammars = grammars
        self._leading: StepLeader | None = None
        self._builder = StepBuilder(
            self.layout,
            self.stage,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            dtype=self.dtype,
            supports_grammars=grammars is not None,
        )
        self._feeds_on_device = model.kernels_name == "triton"
        self._host = None
        if host_memory is not None:
            self._host = KvTensors(self.layout, self.num_blocks, host_memory, pool.device)
        self._staging = self.make_staging() if self.is_staged else None

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
        rank_group: RankGroup | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        num_threads: int = 1,
        load_format: str = "auto",
        quantise: str = "auto",
        kernels: str = "auto",
        attention: str = "auto",
        cache_folder: Path | None = None,
        progress: Progress | None = None,
        shared_cores: SharedCores | None = None,
    ) -> "Engine":
        """Loads the weights and creates the KV pool in `memory`, or in newly allocated memory if None. Raises
        ConfigError. `dtype` is the compute dtype; None means the layout's dtype, which must not be quantised then.

        `kernels` and `attention`: auto, native, torch or triton. Native code is compiled once into `cache_folder`
        (`protocol.process.machine.cache_folder`); without a folder, auto means torch. `device`: cpu, cuda (auto means
        triton) or cpu-staged (`engine.cuda.device`). On cuda and cpu-staged the KV pool is in the engine's own memory,
        and `make_staging` copies between it and `memory`. `shared_cores`: those of the host, from which native kernels
        borrow; None = compute in `num_threads` only, which is set for the whole process.

        `stage`: only its layers are loaded and have KV in `memory`. `config` and `layout` describe the whole model, and
        so does the fingerprint, which is equal at all stages. `rank_group`: only this rank's share of the weights is
        loaded, and only its heads are written to `memory`, which all ranks map."""
        set_threads(num_threads)
        place = find_device(CPU if device == STAGED else device)
        is_staged = device == STAGED or (place.type == "cuda" and memory is not None)
        own = stage or split_into_stages(config.num_layers, 1)[0]
        triton = place.type == "cuda" or "triton" in (kernels, attention)
        _require_possible(layout, own, rank_group, own_memory=device != CPU, triton=triton)
        if triton and quantise != "auto":
            raise ConfigError(f"--quantize {quantise} is for CPUs only: the Triton kernels read plain weights")
        grammars = GrammarMasks(model_path, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids)
        compiling = None if progress is None else partial(progress, "compiling kernels", 0.0)
        if kernels == TRANSFORMERS or not config.has_own_kernels:
            from moonserve.engine.kernels.transformers_model import load_over_transformers  # imports transformers

            possible = own.size == 1 and rank_group is None and device == CPU and quantise == "auto"
            if not possible or kernels not in ("auto", TRANSFORMERS):
                raise ConfigError(
                    f"{config.architecture} is computed by transformers on one CPU worker: start with --kernels auto, "
                    "--device cpu, without --quantize, pipeline stages and tensor-parallel ranks; or with --engine vllm"
                )
            whole = load_over_transformers(model_path, config, layout, num_blocks, memory, dtype, load_format)
            return cls(config, whole, whole, whole.pool, whole.fingerprint, grammars=grammars)
        shard = None if rank_group is None else rank_group.shard
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
            quantise=quantise,
            keeps_integers=keeps_integers(kernels, place, cache_folder),
        )
        config = config.of_layers(own.layers)
        part, heads = (config, None) if shard is None else (shard.shard_config(config), shard.kv_heads)
        own_layout = layout.of_layers(config.num_layers)
        pool = KvTensors(own_layout, num_blocks, None if is_staged else memory, place, heads, dtype)
        layers = make_kernels(
            kernels,
            part,
            weights,
            pool,
            num_threads=num_threads,
            cache_folder=cache_folder,
            compiling=compiling,
            collectives=None if rank_group is None else rank_group.collectives,
            shared_cores=shared_cores,
        )
        geometry = Geometry(part.num_heads, part.num_kv_heads, part.head_dim, weights.sinks, part.latent_heads)
        backend = make_attention(attention, geometry, pool, cache_folder, thread_pool_of(layers))
        plain = Model(part, layers, backend, gives_logits=own.is_last, logits_gather=rank_group)
        model = with_graphs(plain, config, pool)
        identity = make_fingerprint(weights.digest, layout, dtype)
        host_memory = memory if is_staged else None
        return cls(config, model, backend, pool, identity, own, rank_group, host_memory, grammars, shared_cores)

    @property
    def is_staged(self) -> bool:
        """True if the engine computes from its own KV memory instead of the memory that it was given."""
        return self._host is not None

    def make_staging(self) -> BlockCopier:
        """Creates a copier between the pool and the memory given to `load`, for use by one caller."""
        assert self._host is not None, "the pool is in that memory"
        return BlockCopier(self._pool, self._host)

    def set_step_leader(self, leading: StepLeader) -> None:
        """Makes this engine rank 0: each later step is sent to the other ranks of the rank_group."""
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
        The entry of a slice with a draft has further tokens in `after_draft`.

        `on_layer(l)` is called when this step's K and V of layer l are in the memory given to `load`: right after they
        are computed, or slightly later if they have to be copied out of the pool. `before_attention(l)` is called after
        they are computed and before the layer's attention reads any KV; not so with other ranks, where both are called
        at the end of the layer.

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
    ) -> PendingStep:
        """Starts a step with the arguments of `execute`; `PendingStep.end` returns its result. On a GPU, greedy tokens
        are not waited for, any other sampling waits for the logits; on a CPU the step is complete on return. A slice
        with `token_from_previous_step` takes its token from the step begun before, on the device if it is there."""
        if not slices:
            return PendingStep(0)
        for piece in slices:
            self._builder.check(piece)
        order = self._attention.order([(piece.start, piece.end) for piece in slices])
        ordered = [slices[index] for index in order]
        places = [at for at in order if slices[at].samples] if self.stage.is_last else []
        sampling = [slices[at] for at in places]
        if any(piece.num_draft for piece in sampling):
            places, sampling = with_draft_rows(places, sampling)
        if any(piece.token_from_previous_step for piece in sampling) and self._builder.previous_step is not None:
            sampling = with_history(sampling, self._builder.previous_step)
        masks = None if self.grammars is None else self.grammars.begin(sampling)
        with torch.inference_mode():
            step = self._builder.build(ordered, hidden)
            dirty = self._builder.find_dirty_slots(ordered) if self._attention.reads_whole_blocks else None
            with self._hooks(ordered, on_layer, before_attention) as hook:
                if self._leading is None:
                    output = self.run(step, dirty, hook)
                else:
                    output = self._leading.run(self.run, step, dirty, hook)
            if self.stage.is_last:
                allowed = None if masks is None else masks.result()
                output = score_prompts(output, ordered)
                stays = self._feeds_on_device
                begun = sample_step(len(slices), places, sampling, output, allowed, may_stay=stays)
            else:
                begun = PendingStep(len(slices))
                if hidden is not None and hidden.passed_on is not None:
                    self._builder.rows_of(hidden.passed_on, len(output)).copy_(output)
                    if hidden.on_passed is not None:
                        hidden.on_passed()
        self._builder.previous_step = begun
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
            staging.flush(wait=False)

        try:
            yield _both(computed, before_attention)
        finally:
            staging.flush(wait=True)

    def _touched(self, slices: Sequence[Slice]) -> list[BlockId]:
        """Returns the blocks that a step writes to, without duplicates."""
        size = self.layout.block_size
        blocks = (s.block_table[s.start // size : self.layout.blocks_for(s.end)] for s in slices)
        return list(dict.fromkeys(chain.from_iterable(blocks)))

    def run(self, step: Step, dirty: torch.Tensor | None, on_layer: OnLayer | None = None) -> torch.Tensor:
        """Runs a step that is already checked and laid out, and returns the result of `ForwardPass.forward`. Called by
        `begin` and by a rank that follows rank 0. `dirty`: slots to zero beforehand."""
        with torch.inference_mode(), self._computing:
            if dirty is not None:
                self._pool.clear(dirty)
            return self._model.forward(step, on_layer)


def staging_of(engine: Engine) -> Staging:
    """Returns the `Staging` that the engine's pool needs."""
    return StagingThread(engine.make_staging()) if engine.is_staged else InPlace()


def _both(first: OnLayer | None, second: OnLayer | None) -> OnLayer | None:
    if first is None or second is None:
        return first or second

    def call(layer: int) -> None:
        first(layer)
        second(layer)

    return call


def _require_possible(
    layout: KvLayout, stage: Stage, ranks: RankGroup | None, *, own_memory: bool, triton: bool
) -> None:
    """Raises ConfigError for unsupported combinations. `own_memory`: the KV is in a device's own memory."""
    if stage.size > 1 and own_memory:
        raise ConfigError("pipeline stages run on CPUs only; start with --device cpu")
    if ranks is not None and (stage.size > 1 or own_memory):
        raise ConfigError("tensor-parallel ranks run on CPUs only and without pipeline stages; start with --device cpu")
    if layout.is_quantised and triton:
        raise ConfigError(f"KV in {layout.dtype} is for CPUs only: the Triton kernels do not read it")


def set_threads(num_threads: int) -> None:
    """Sets the number of threads of torch's operations for the whole process."""
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:
        # torch refuses this once work has begun in the process; idle threads do no harm.
        with suppress(RuntimeError):
            torch.set_num_interop_threads(1)


class EngineThread:
    """Asynchronous interface to an `Engine`, so that the event loop stays responsive while a step computes: torch
    releases the interpreter lock inside its operations. One thread runs the steps in the order of the calls and is the
    engine's only caller."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        before_attention: Callable[[int], None] | None = None,
        hidden: HiddenStates | None = None,
    ) -> list[Sampled | None]:
        """Runs `Engine.execute` in the engine's thread; its callbacks run there too. A step cannot be interrupted: if
        the caller is cancelled, the call waits for the end of the step before it re-raises, so that blocks are never
        released while the step writes to them."""
        step = partial(self.engine.execute, slices, on_layer, before_attention=before_attention, hidden=hidden)
        return await run_uninterrupted(self._executor, step)

    async def begin(self, slices: Sequence[Slice]) -> PendingStep:
        """Runs `Engine.begin` in the engine's thread. Steps must be passed to `end` in the order of these calls."""
        return await run_uninterrupted(self._executor, partial(self.engine.begin, slices))

    async def end(self, step: PendingStep) -> list[Sampled | None]:
        """Runs `PendingStep.end` in the engine's thread. Cancellation is handled like in `execute`."""
        return await run_uninterrupted(self._executor, step.end)

    async def prepare(self, sampling: SamplingParams) -> None:
        """Compiles a request's grammar, if it has one, in another thread, so that no step waits for it. Raises
        InvalidRequest for a grammar that the engine does not support."""
        if sampling.grammar and self.engine.grammars is not None:
            await asyncio.to_thread(self.engine.grammars.prepare, sampling.grammar)

    def execute_inline(self, slices: Sequence[Slice]) -> list[Sampled | None]:
        """Runs `Engine.execute` in the caller's thread, for steps that are shorter than waking another thread. Only for
        a caller that never has two steps in flight."""
        return self.engine.execute(slices, None)

    async def run(self, function: Callable[[], T]) -> T:
        """Runs `function` between steps, for work that needs exclusive use of the engine, such as a measurement."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Waits for the running step and ends the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
