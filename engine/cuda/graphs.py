"""CUDA graphs for decode steps: one per batch size of a short list, captured when it is first needed.

A decode step is hundreds of launches, each of which costs the host more time than the GPU; a graph is one launch. Its
inputs are tensors at fixed addresses that are filled before each replay. A smaller batch is padded with rows that have
no context and store nothing, and whose results are cut off. Steps with prompts or with `on_layer` run without a graph.
"""

from collections.abc import Callable

import torch

from moonserve.engine.cuda.attention import Plan, table_columns
from moonserve.engine.cuda.layers import longest_sequence
from moonserve.engine.cuda.streams import Event, make_stream, record_event
from moonserve.engine.kernels import Step
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.forward_pass import ForwardPass, Model

Replay = Callable[[], torch.Tensor]
"""Runs captured work on the current contents of its inputs. The next replay overwrites the result."""

Capture = Callable[[Callable[[], torch.Tensor]], Replay]
"""Captures work whose inputs and outputs have fixed addresses."""

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Batch sizes of the graphs. Larger batches run without a graph: launches are a small part of their time."""


def with_graphs(model: Model, config: ModelConfig, pool: KvTensors) -> ForwardPass:
    """Returns the model with CUDA graphs if its pool is on a CUDA device, otherwise the model itself."""
    return model if pool.device.type != "cuda" else GraphedModel(model, config, pool, CudaCapture(pool.device))


class GraphedModel:
    """A `Model` on Triton kernels whose decode steps are replayed graphs. The first step of each batch size takes
    longer, since it captures."""

    def __init__(self, model: Model, config: ModelConfig, pool: KvTensors, capture: Capture) -> None:
        self.kernels_name = model.kernels_name
        self._model = model
        self._device = pool.device
        self._longest = longest_sequence(config, pool)
        self._num_slots = pool.num_blocks * pool.layout.block_size
        self._columns = table_columns(pool.layout.blocks_for(self._longest))
        self._capture = capture
        self._graphs: dict[int, tuple[_Inputs, Replay]] = {}  # by batch size

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Runs the step, as a graph if possible. The logits are valid until the next call; see `Model.forward`."""
        batch = self._batch_for(step)
        if batch is None or on_layer is not None:
            return self._model.forward(step, on_layer)
        graph = self._graphs.get(batch)
        if graph is None:
            graph = self._graphs[batch] = self._make(batch)
        inputs, replay = graph
        inputs.fill(step)
        return replay()[: len(step.spans)]

    def _batch_for(self, step: Step) -> int | None:
        """Returns the graph's batch size for a step, or None if it is not a decode step or too large."""
        rows = len(step.spans)
        if len(step.token_ids) != rows or step.rows is not None or step.longest > self._longest:
            return None
        return next((batch for batch in BATCHES if batch >= rows), None)

    def _make(self, batch: int) -> "tuple[_Inputs, Replay]":
        inputs = _Inputs(batch, self._columns, self._num_slots, self._device)
        step = inputs.step(self._longest)
        plans = {window: inputs.plan(self._longest, window) for window in self._model.windows}
        return inputs, self._capture(lambda: self._model.run(step, plans))


class _Inputs:
    """Input tensors of a captured step, and the host memory from which they are filled."""

    def __init__(self, batch: int, columns: int, num_slots: int, device: torch.device) -> None:
        tokens = torch.zeros((3, batch), dtype=torch.int64)  # tokens, positions, slots
        tokens[2] = num_slots  # behind the pool's end, so that padding rows store nothing
        self._num_slots = num_slots
        tables = torch.zeros((batch, columns), dtype=torch.int32)
        ends = torch.zeros(batch, dtype=torch.int32)
        self._on_host = tuple(_pinned(one, device) for one in (tokens, tables, ends))
        self._on_device = tuple(one.to(device, copy=True) for one in self._on_host)
        self._arrived: Event | None = None

    def step(self, longest: int) -> Step:
        token_ids, positions, slots = self._on_device[0]
        return Step(
            token_ids=token_ids,
            positions=positions,
            longest=longest,
            slots=slots,
            spans=(),
            rows=None,
        )

    def plan(self, longest: int, window: int | None) -> Plan:
        from moonserve.engine.cuda.attention_kernels import DecodeBatch, parts_for

        _, tables, ends = self._on_device
        return Plan(DecodeBatch(tables, ends, parts_for(longest, window)), None, window)

    def fill(self, step: Step) -> None:
        """Copies the step to the device, queued after the work in flight there."""
        if self._arrived is not None:
            self._arrived.synchronize()  # the previous copy may still read the host memory
        rows = len(step.spans)
        tokens, tables, ends = (one.numpy() for one in self._on_host)  # numpy is cheaper for small writes
        tokens[:2, rows:] = 0
        tokens[2, rows:] = self._num_slots
        ends[rows:] = 0
        for place, values in enumerate((step.token_ids, step.positions, step.slots)):
            tokens[place, :rows] = values.numpy()
        for row, span in enumerate(step.spans):
            ends[row] = span.end
            tables[row, : len(span.blocks)] = span.blocks
        for source, target in zip(self._on_host, self._on_device, strict=True):
            target.copy_(source, non_blocking=True)
        if step.device_tokens is not None:
            step.device_tokens.put_into(self._on_device[0][0])
        if self._on_host[0].is_pinned():
            self._arrived = record_event()


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


class CudaCapture:
    """`Capture` with CUDA graphs. They share the memory of intermediate results, so only one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Replay:
        self._warm_up(work)
        graph = torch.cuda.CUDAGraph()
        # Captures this thread only: other threads stage blocks meanwhile, which allocates and waits.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def _warm_up(self, work: Callable[[], torch.Tensor]) -> None:
        """Runs the work twice, so that kernels are compiled and libraries allocate, which cannot be captured. Uses a
        stream other than the default one, like the capture."""
        stream = make_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
