"""Spans, as collectors and files get them."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from protocol.errors import ConfigError
from protocol.tracing import Tracer, TracingConfig, tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
INCOMING = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


@contextmanager
def writing(folder: Path, ratio: float = 1.0) -> Iterator[Tracer]:
    config = TracingConfig(trace_dir=str(folder), trace_sample_ratio=ratio)
    with tracing(config, "gateway-0", "gateway") as tracer:
        yield tracer


def written(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "gateway-0.jsonl").read_text().splitlines()]


def test_without_a_place_to_send_spans_nothing_is_traced() -> None:
    with tracing(TracingConfig(), "gateway-0", "gateway") as tracer:
        assert tracer.begin("request", INCOMING) is None


def test_a_part_hangs_below_its_request_in_the_clients_trace(tmp_path: Path) -> None:
    with writing(tmp_path) as tracer:
        root = tracer.begin("request", INCOMING)
        assert root is not None
        now = time.monotonic()
        part = tracer.span("prefill", root.traceparent, now - 2.0, now - 1.5, cached_tokens=3)
        tracer.span("queue", part, now - 2.0, now - 1.8)
        root.end("overloaded", request_id="r")
    spans = {span["name"]: span for span in written(tmp_path)}
    assert {span["context"]["trace_id"] for span in spans.values()} == {f"0x{TRACE}"}
    assert spans["request"]["parent_id"] == "0xb7ad6b7169203331"
    assert spans["prefill"]["parent_id"] == spans["request"]["context"]["span_id"]
    assert spans["queue"]["parent_id"] == spans["prefill"]["context"]["span_id"]
    assert spans["prefill"]["attributes"] == {"cached_tokens": 3}
    assert spans["request"]["status"] == {"status_code": "ERROR", "description": "overloaded"}
    resource = spans["queue"]["resource"]["attributes"]
    assert resource["service.instance.id"] == "gateway-0"


@pytest.mark.parametrize(
    ("incoming", "ratio", "is_traced"),
    [
        ("", 1.0, True),
        ("", 0.0, False),
        (INCOMING, 0.0, True),
        (UNSAMPLED, 1.0, False),
        ("not a traceparent", 1.0, True),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", 1.0, True),
    ],
)
def test_clients_decide_and_else_the_ratio(tmp_path: Path, incoming: str, ratio: float, is_traced: bool) -> None:
    with writing(tmp_path, ratio) as tracer:
        assert (tracer.begin("request", incoming) is not None) == is_traced


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OpenTelemetry collector takes."""

    received: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            raise AssertionError("nobody asked for that")
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in of_resource.scope_spans:
                self.received += [span.name for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """To nobody."""


def test_a_collector_gets_them_over_otlp() -> None:
    Collector.received = []
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        with tracing(TracingConfig(otlp_traces_endpoint=url), "prefill-0", "prefill") as tracer:
            tracer.span("prefill", INCOMING, time.monotonic() - 1.0, time.monotonic())
        server.shutdown()
        thread.join()
    assert Collector.received == ["prefill"]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (TracingConfig(trace_sample_ratio=1.5), "--trace-sample-ratio"),
        (TracingConfig(otlp_traces_endpoint="localhost:4317"), "--otlp-traces-endpoint"),
        (TracingConfig(trace_dir="/proc/nowhere"), "--trace-dir"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(config: TracingConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint), tracing(config, "x", "gateway"):
        pass
