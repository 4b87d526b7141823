"""Records when prompts are loaded, computed and sent, and draws the spans as SVG.

Times are seconds of `time.perf_counter`; after `since`, they count from the prompt's arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from moonserve.engine.engine import Engine, EngineThread
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.objects import ReadLease
from moonserve.prefill_worker.pipeline_leader import FollowerClient
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import Batch, Op, ScatterTransfer, TransferEngine
from moonserve.transfer.batch import AnyTransfer
from moonserve.transfer.memory import scatter

Span = tuple[float, float]


@dataclass(slots=True)
class PrefillTimeline:
    """Time spans of one prompt's leases, reads, checks, steps, pauses and sends."""

    leases: list[Span] = field(default_factory=list)
    reads: list[Span] = field(default_factory=list)  # of all layers or of some
    checks: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    pauses: list[Span] = field(default_factory=list)  # waits between a layer's projection and its attention
    sends: list[Span] = field(default_factory=list)  # to a decode worker

    def _all(self) -> tuple[list[Span], ...]:
        return self.leases, self.reads, self.checks, self.steps, self.pauses, self.sends

    def clear(self) -> None:
        for spans in self._all():
            spans.clear()

    def since(self, began_at: float) -> PrefillTimeline:
        """Returns a copy with times counted from `began_at`."""

        def moved(spans: Sequence[Span]) -> list[Span]:
            return [(begin - began_at, end - began_at) for begin, end in spans]

        return PrefillTimeline(*map(moved, self._all()))

    @property
    def load(self) -> Span | None:
        """Span from the first request for a lease to the last verified block; None if nothing was loaded."""
        spans = [*self.leases, *self.reads, *self.checks]
        return (min(b for b, _ in spans), max(e for _, e in spans)) if spans else None

    @property
    def load_s(self) -> float:
        return self.load[1] - self.load[0] if self.load else 0.0

    @property
    def compute_s(self) -> float:
        return _length(self.steps) - _length(self.pauses)

    @property
    def hidden_share(self) -> float:
        """Share of the load time in which the engine computed."""
        if self.load is None:
            return 0.0
        beside = _overlap(self.steps, self.load) - _overlap(self.pauses, self.load)
        return beside / self.load_s


def _length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _overlap(spans: Sequence[Span], other: Span) -> float:
    return sum(max(min(end, other[1]) - max(begin, other[0]), 0.0) for begin, end in spans)


class RecordedTransfer(TransferEngine):
    """Transfer engine that records its writes."""

    record: PrefillTimeline | None = None

    def submit(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> Batch:
        began_at = time.perf_counter()
        batch = super().submit(transfers, deadline_s=deadline_s)
        record = self.record
        if record is not None and transfers[0].op is Op.WRITE:
            batch.add_done_callback(lambda _: record.sends.append((began_at, time.perf_counter())))
        return batch


class RecordedEngine:
    """Wraps an engine thread and records its steps and pauses."""

    def __init__(self, thread: EngineThread, record: PrefillTimeline) -> None:
        self._thread = thread
        self._record = record

    async def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        before_attention: Callable[[int], None] | None = None,
        **more: Any,
    ) -> list[Sampled | None]:
        def watched(layer: int) -> None:
            began_at = time.perf_counter()
            try:
                for hook in (on_layer, before_attention):
                    if hook is not None:
                        hook(layer)
            finally:
                self._record.pauses.append((began_at, time.perf_counter()))

        began_at = time.perf_counter()
        try:
            return await self._thread.execute(slices, watched, **more)
        finally:
            self._record.steps.append((began_at, time.perf_counter()))


class RecordedStores(BlockStores):
    """Store client that records leases, reads and checks, and delays reads to the rate `bytes_per_s`."""

    def __init__(self, channels: Channels, transfer: TransferEngine, record: PrefillTimeline) -> None:
        super().__init__(channels, transfer)
        self._record = record
        self.bytes_per_s: float | None = None

    async def lease(
        self,
        store: Endpoint,
        keys: Sequence[BlockKey],
        *,
        ttl_s: float = 10.0,
        timeout_s: float = 2.0,
    ) -> ReadLease:
        began_at = time.perf_counter()
        lease = await super().lease(store, keys, ttl_s=ttl_s, timeout_s=timeout_s)
        self._record.leases.append((began_at, time.perf_counter()))
        return lease

    async def transfer(self, lease: ReadLease, transfer: ScatterTransfer, *, deadline_s: float) -> None:
        began_at = time.perf_counter()
        await super().transfer(lease, transfer, deadline_s=deadline_s)
        await self._arrived(began_at, scatter.total(transfer.rows))

    async def read(
        self, store: Endpoint, keys: Sequence[BlockKey], spots: BufferSlots, *, deadline_s: float
    ) -> list[int]:
        began_at = time.perf_counter()
        checksums = await super().read(store, keys, spots, deadline_s=deadline_s)
        await self._arrived(began_at, spots.nbytes)
        return checksums

    async def _arrived(self, began_at: float, nbytes: int) -> None:
        if self.bytes_per_s is not None:
            arrives_at = began_at + nbytes / self.bytes_per_s
            await asyncio.sleep(max(arrives_at - time.perf_counter(), 0.0))
        self._record.reads.append((began_at, time.perf_counter()))

    async def verify(self, lease: ReadLease, spots: BufferSlots) -> int:
        began_at = time.perf_counter()
        num_good = await super().verify(lease, spots)
        self._record.checks.append((began_at, time.perf_counter()))
        return num_good


# SVG: times are drawn from _LEFT to _WIDTH on one scale.

_WIDTH, _LEFT, _TOP = 960, 150, 34


def _scale(end_s: float) -> float:
    return (_WIDTH - _LEFT - 20) / end_s


def _text(x: int, y: int, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _write_svg(path: Path, height: int, title: str, body: Sequence[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    path.write_text("\n".join([head, _text(10, 18, title, bold=True), *body, "</svg>"]) + "\n")


# Loading and computing, with a row each for the load, the engine and the handoff.

_LOAD_ROW = 26
_LOAD_COLOURS = {
    "lease": "#8d99ae",
    "read": "#3a86ff",
    "verify": "#8338ec",
    "compute": "#2a9d8f",
    "send": "#e76f51",
}


def draw_load(path: Path, title: str, records: Sequence[tuple[str, PrefillTimeline]]) -> None:
    """Writes an SVG file with the records below each other on one scale in milliseconds."""
    end_s = max(end for _, record in records for _, end in [*record.steps, *record.sends])
    rows: list[str] = []
    top = _TOP
    for name, record in records:
        rows.append(_text(10, top + 14, name, bold=True))
        rows += _spans("lease", record.leases, top, end_s)
        rows += _spans("read", record.reads, top, end_s)
        rows += _spans("verify", record.checks, top, end_s)
        rows.append(_text(_LEFT - 8, top + 14, "load", anchor="end"))
        top += _LOAD_ROW
        rows += _spans("compute", _computing(record), top, end_s)
        rows.append(_text(_LEFT - 8, top + 14, "engine", anchor="end"))
        top += _LOAD_ROW
        rows += _spans("send", record.sends, top, end_s)
        rows.append(_text(_LEFT - 8, top + 14, "handoff", anchor="end"))
        top += _LOAD_ROW + 14
    rows += _axis(top, end_s)
    height = top + 54
    legend = [
        f'<rect x="{_LEFT + 130 * i}" y="{height - 20}" width="12" height="12" fill="{colour}"/>'
        + _text(_LEFT + 130 * i + 18, height - 10, name)
        for i, (name, colour) in enumerate(_LOAD_COLOURS.items())
    ]
    _write_svg(path, height, title, [*rows, *legend])


def _computing(record: PrefillTimeline) -> list[Span]:
    """Returns the spans of computing: the steps without their pauses, so one span per layer."""
    spans: list[Span] = []
    for begin, end in record.steps:
        at = begin
        for pause in record.pauses:
            if begin <= pause[0] <= end:
                spans.append((at, pause[0]))
                at = pause[1]
        spans.append((at, end))
    return spans


def _spans(kind: str, spans: Sequence[Span], top: int, end_s: float) -> list[str]:
    scale = _scale(end_s)
    return [
        f'<rect x="{_LEFT + begin * scale:.1f}" y="{top}" width="{max((end - begin) * scale - 0.6, 0.4):.1f}" '
        f'height="{_LOAD_ROW - 6}" fill="{_LOAD_COLOURS[kind]}" fill-opacity="{0.5 if kind == "send" else 1}"/>'
        for begin, end in spans
    ]


def _axis(top: int, end_s: float) -> list[str]:
    scale = _scale(end_s)
    step_ms = next(s for s in (10, 20, 50, 100, 200, 500, 1000, 5000) if end_s * 1e3 / s <= 12)
    marks = range(0, int(end_s * 1e3) + 1, step_ms)
    return [
        f'<line x1="{_LEFT + ms * scale / 1e3:.1f}" y1="{_TOP - 6}" x2="{_LEFT + ms * scale / 1e3:.1f}" '
        f'y2="{top}" stroke="#ddd"/>' + _text(_LEFT + int(ms * scale / 1e3), top + 14, f"{ms} ms", anchor="middle")
        for ms in marks
    ]


# The steps of each stage that computes chunks of a prompt, in seconds of the leader's clock.

_STAGE_ROW = 30
_STAGE_COLOURS = ("#2a9d8f", "#e9c46a")


class SpanRecorder:
    """Recorded spans of one row of the picture."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def watch_engine(self, engine: Engine) -> None:
        """Wraps `engine.execute` to record each further step."""
        execute = engine.execute

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return execute(*arguments, **options)
            finally:
                self.spans.append((began, time.perf_counter()))

        engine.execute = timed  # type: ignore[method-assign]

    def watch_follower(self, follower: FollowerClient) -> None:
        """Wraps `follower.run` to record each step, from the call or the end of the previous step, to the answer."""
        run = follower.run

        async def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            outcome = await run(*arguments)
            free_at = self.spans[-1][1] if self.spans else 0.0
            self.spans.append((max(began, free_at), time.perf_counter()))
            return outcome

        follower.run = timed  # type: ignore[method-assign,assignment]


def draw_stages(path: Path, title: str, rows: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Writes an SVG file with one row of chunks below the other. After a row without a name, time starts at 0 again."""
    clocks = [_zero([spans for name, spans in part if name]) for part in _parts(rows)]
    end_s = max(end for part in clocks for spans in part for _, end in spans)
    scale = _scale(end_s)
    names = [name for name, _ in rows if name]
    body: list[str] = []
    for place, (name, spans) in enumerate(zip(names, [s for part in clocks for s in part], strict=True)):
        top = _TOP + place * _STAGE_ROW
        body.append(_text(_LEFT - 8, top + 15, name, anchor="end"))
        body += [
            f'<rect x="{_LEFT + begin * scale:.1f}" y="{top}" width="{max((end - begin) * scale - 1, 0.5):.1f}" '
            f'height="{_STAGE_ROW - 8}" fill="{_STAGE_COLOURS[chunk % 2]}"/>'
            + _text(int(_LEFT + (begin + end) / 2 * scale), top + 15, str(chunk), anchor="middle")
            for chunk, (begin, end) in enumerate(spans)
        ]
    bottom = _TOP + len(names) * _STAGE_ROW
    marks = range(int(end_s) + 1)
    body += [_text(int(_LEFT + mark * scale), bottom + 14, f"{mark} s", anchor="middle") for mark in marks]
    _write_svg(path, bottom + 24, title, body)


def _parts(rows: Sequence[tuple[str, Sequence[Span]]]) -> list[list[tuple[str, Sequence[Span]]]]:
    parts: list[list[tuple[str, Sequence[Span]]]] = [[]]
    for row in rows:
        if row[0]:
            parts[-1].append(row)
        else:
            parts.append([])
    return parts


def _zero(rows: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """Returns the spans with times counted from the earliest begin."""
    began = min(begin for spans in rows for begin, _ in spans)
    return [[(begin - began, end - began) for begin, end in spans] for spans in rows]
