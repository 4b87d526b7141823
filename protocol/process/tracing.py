"""OpenTelemetry spans of requests across processes; off unless a process has a destination for them.

A trace's context is a W3C `traceparent` in the cluster's messages; an empty one means that the request is not traced.
The process that begins a trace decides whether it is sampled, and without a context the others make no spans. Except
for a request's root, spans are made when they are over, from times on the process's own monotonic clock; clocks of
different hosts are never compared. OpenTelemetry (extra `tracing`) is imported only if tracing is on.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Attribute = str | int | float | bool

_EXPORT_TIMEOUT_S = 2.0  # an unreachable collector must not delay the end of a process
_BATCH_MS = 500


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Tracing options of processes that handle requests."""

    otlp_traces_endpoint: str | None = option(
        None,
        help="send spans to this OpenTelemetry collector over HTTP, for example http://localhost:4318/v1/traces "
        "(needs moonserve[tracing])",
    )
    trace_dir: str | None = option(
        None,
        help="write spans as JSON lines into this folder, a file per process (needs moonserve[tracing])",
    )
    trace_sample_ratio: float = option(1.0, help="share of requests to trace if the client does not decide, 0 to 1")

    def check_tracing(self) -> None:
        """Raises ConfigError if the options are invalid."""
        if not 0.0 <= self.trace_sample_ratio <= 1.0:
            raise ConfigError(f"--trace-sample-ratio must be from 0 to 1, not {self.trace_sample_ratio}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint} must be a URL such as http://localhost:4318/v1/traces"
            )


class RequestSpan:
    """Open span of a whole request."""

    def __init__(self, span: "Span") -> None:
        self._span = span
        self.traceparent = _traceparent(span)
        """The `parent` of the request's parts, in this and in other processes."""

    def end(self, error: str | None, **attributes: Attribute) -> None:
        """Ends the span now. `error` is the reason if the request failed."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracer:
    """Makes spans with OpenTelemetry's SDK. Without a provider it traces nothing, even if a client requests it."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._tracer = None if provider is None else provider.get_tracer("moonserve")

    def begin(self, name: str, incoming: str) -> RequestSpan | None:
        """Begins the span of a request now and returns it, or None if the request is not traced.

        `incoming` is the client's traceparent; an empty or malformed one starts a new trace."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(name, _context(incoming), kind=SpanKind.SERVER)
        return RequestSpan(span) if span.is_recording() else None

    def span(self, name: str, parent: str, started_at: float, ended_at: float, **attributes: Attribute) -> str:
        """Records a finished part between two monotonic times. `parent` is a traceparent; returns the part's own."""
        if self._tracer is None:
            return ""
        span = self._tracer.start_span(
            name, _context(parent), start_time=_wall_ns(started_at), attributes=dict(attributes)
        )
        span.end(_wall_ns(ended_at))
        return _traceparent(span)


@contextlib.contextmanager
def tracing(config: TracingConfig, instance_id: str, role: str) -> Iterator[Tracer]:
    """Yields the tracer of a process and flushes it after the block. Raises ConfigError if tracing cannot be set up."""
    config.check_tracing()
    if config.otlp_traces_endpoint is None and config.trace_dir is None:
        yield Tracer()
        return
    with contextlib.ExitStack() as stack:
        provider = _provider(config, instance_id, role, stack)
        stack.callback(provider.shutdown)
        yield Tracer(provider)


def _provider(config: TracingConfig, instance_id: str, role: str, stack: contextlib.ExitStack) -> "TracerProvider":
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(f"tracing needs pip install 'moonserve[tracing]' ({error})") from error
    resource = Resource.create(
        {
            "service.namespace": "moonserve",
            "service.name": f"moonserve-{role}",
            "service.instance.id": instance_id,
        }
    )
    sampler = ParentBased(TraceIdRatioBased(config.trace_sample_ratio))
    provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    for exporter in _exporters(config, instance_id, stack):
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_BATCH_MS))
    return provider


def _exporters(config: TracingConfig, instance_id: str, stack: contextlib.ExitStack) -> "Iterator[SpanExporter]":
    if config.otlp_traces_endpoint is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        yield OTLPSpanExporter(config.otlp_traces_endpoint, timeout=_EXPORT_TIMEOUT_S)
    if config.trace_dir is not None:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        path = Path(config.trace_dir) / f"{instance_id}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--trace-dir: cannot write {path}: {error.strerror}") from error
        yield ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")


def _context(traceparent: str) -> "Context":
    """Returns the context of a traceparent; an empty context if it is malformed."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _traceparent(span: "Span") -> str:
    """Returns the traceparent of a span (W3C Trace Context, version 00)."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _wall_ns(at: float) -> int:
    """Converts a monotonic time to Unix nanoseconds by the current difference of this process's clocks."""
    return time.time_ns() - int((time.monotonic() - at) * 1e9)
