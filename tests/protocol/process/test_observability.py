"""Tests of observability: log lines with request ids, progress, tracing spans, and metrics."""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process import logs, progress_bars
from moonserve.protocol.process.logs import request_extra, requests_extra
from moonserve.protocol.process.metrics import FastCounter, FastHistogram
from moonserve.protocol.process.progress_bars import LINE_EVERY_S, ProgressBars, duration
from moonserve.protocol.process.tracing import Tracer, TracingConfig, tracing
from tests.clock import Clock
from tests.patience import until
from tests.terminal import terminal

pytestmark = pytest.mark.usefixtures("untouched")
log = logging.getLogger("some.module")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_json_line_has_extra_fields_and_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("decode-0", log_format="json", level="info")
    log.info("landed: %d blocks", 3, extra={**request_extra("req-1"), "seconds": 0.5})
    log.debug("not asked for")
    log.error("a step failed", exc_info=RuntimeError("no memory"), extra=requests_extra(["req-1", "req-2"]))
    landed, failed = map(json.loads, lines(capsys))
    assert landed["message"] == "landed: 3 blocks"
    assert (landed["level"], landed["instance"], landed["logger"]) == ("info", "decode-0", "some.module")
    assert (landed["request_id"], landed["seconds"]) == ("req-1", 0.5)
    assert failed["request_ids"] == ["req-1", "req-2"]
    assert failed["exception"].endswith("RuntimeError: no memory")


def test_human_line_ends_with_request_ids(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("100%-sure", log_format="human", level="info")
    log.warning("given up: no blocks", extra=request_extra("req-1"))
    log.warning("a step failed", extra=requests_extra(["req-1", "req-2"]))
    log.warning("nobody's")
    one, two, none = lines(capsys)
    assert one.endswith("W 100%-sure some.module: given up: no blocks request_id=req-1")
    assert two.endswith("a step failed request_ids=req-1,req-2")
    assert none.endswith("some.module: nobody's")


def test_debug_level_excludes_verbose_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway-0", log_format="human", level="debug")
    logging.getLogger("asyncio").debug("Using selector: EpollSelector")
    log.debug("placed")
    assert [line.rpartition(": ")[2] for line in lines(capsys)] == ["placed"]
    logs.configure("gateway-0", log_format="human", level="error")
    logging.getLogger("asyncio").warning("slow")
    assert not lines(capsys)


TRACE = "0af7651916cd43dd8448eb211c80319c"
INCOMING = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


@contextmanager
def writing(folder: Path, ratio: float = 1.0) -> Iterator[Tracer]:
    config = TracingConfig(trace_dir=str(folder), trace_sample_ratio=ratio)
    with tracing(config, "gateway-0", "gateway") as tracer:
        yield tracer


def test_nothing_is_traced_without_a_destination() -> None:
    with tracing(TracingConfig(), "gateway-0", "gateway") as tracer:
        assert tracer.begin("request", INCOMING) is None


def test_spans_are_children_of_request_in_clients_trace(tmp_path: Path) -> None:
    with writing(tmp_path) as tracer:
        root = tracer.begin("request", INCOMING)
        assert root is not None
        now = time.monotonic()
        part = tracer.span("prefill", root.traceparent, now - 2.0, now - 1.5, cached_tokens=3)
        tracer.span("queue", part, now - 2.0, now - 1.8)
        root.end("overloaded", request_id="r")
    spans = {s["name"]: s for s in map(json.loads, (tmp_path / "gateway-0.jsonl").read_text().splitlines())}
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
def test_client_decides_on_sampling_or_the_ratio(tmp_path: Path, incoming: str, ratio: float, is_traced: bool) -> None:
    with writing(tmp_path, ratio) as tracer:
        assert (tracer.begin("request", incoming) is not None) == is_traced


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (TracingConfig(trace_sample_ratio=1.5), "--trace-sample-ratio"),
        (TracingConfig(otlp_traces_endpoint="localhost:4317"), "--otlp-traces-endpoint"),
        (TracingConfig(trace_dir="/proc/nowhere"), "--trace-dir"),
    ],
)
def test_invalid_tracing_options_are_refused_at_start(config: TracingConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint), tracing(config, "x", "gateway"):
        pass


BOUNDS = (0.001, 0.0025, 0.5, 5.0)
LABELS = {"model_name": "demo", "engine": 'a"b'}


def page(registry: CollectorRegistry) -> list[str]:
    """Returns the lines of the metrics page without creation times."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from((0.0, *BOUNDS, 0.002, 7.0)) | st.floats(0, 10), st.integers(0, 3))))
def test_fast_metrics_equal_prometheus_client(observed: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, durations = FastCounter("c", "counts", LABELS), FastHistogram("d_s", "lasts", LABELS, BOUNDS)
    ours.register(count)
    ours.register(durations)
    counter = Counter("c", "counts", tuple(LABELS), registry=theirs).labels(**LABELS)
    histogram = Histogram("d_s", "lasts", tuple(LABELS), registry=theirs, buckets=BOUNDS)
    for seconds, times in observed:
        durations.add(seconds, times)
        count.add(times)
        counter.inc(times)
        for _ in range(times):
            histogram.labels(**LABELS).observe(seconds)
    histogram.labels(**LABELS)  # exists even if nothing was observed
    mine, others = page(ours), page(theirs)
    assert [line.rsplit(" ", 1)[0] for line in mine] == [x.rsplit(" ", 1)[0] for x in others]
    for one, other in zip(mine, others, strict=True):
        if not one.startswith("#"):
            a, b = float(one.rsplit(" ", 1)[1]), float(other.rsplit(" ", 1)[1])
            assert abs(a - b) <= 1e-9 * max(1.0, b)


def test_progress_line_is_printed_every_few_seconds() -> None:
    """The time left is estimated from what was done since the task was first shown, unless the caller knows better."""
    log, clock = StringIO(), Clock(0.0)
    with ProgressBars(log, clock=clock) as progress:
        clock.now = before = 1000.0
        for done in range(11):
            clock.now = before + done * LINE_EVERY_S / 2
            progress.show("copying", done, 10, f"{done} of 10 objects")
            progress.show("resumed", 80 + done, 90, f"{80 + done} of 90")
            progress.show("known", done, 10, f"{done} of 10", left_s=90.0)
    lines = log.getvalue().splitlines()
    assert lines[1:3] == ["resumed: 82 of 90, 20.0 s left", "known: 2 of 10, 1 min 30 s left"]
    lines = [line for line in lines if "copying" in line]
    assert len(lines) == 4
    assert lines[0] == "copying: 2 of 10 objects, 20.0 s left"
    assert "10 of 10" not in log.getvalue(), "the result says so"


def test_short_task_prints_no_line_and_long_busy_task_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StringIO()
    with ProgressBars(log, clock=Clock(0.0)) as progress:
        for done in range(100):
            progress.show("copying", done, 100, "")
        with progress.busy("measuring"):
            pass
        assert not log.getvalue()
        monkeypatch.setattr(progress_bars, "LINE_EVERY_S", 0.01)
        with progress.busy("measuring"):
            until(lambda: log.getvalue() == "measuring …\n")


def test_progress_without_lines_prints_nothing() -> None:
    log, clock = StringIO(), Clock(0.0)
    with ProgressBars(log, lines=False, clock=clock) as progress:
        clock.now = 2 * LINE_EVERY_S
        progress.show("copying", 1, 2, "")
        progress.note("a note")
        with progress.busy("measuring"):
            pass
    assert not log.getvalue()


PROGRAM = """
from moonserve.protocol.process.progress_bars import ProgressBars
with ProgressBars() as progress:
    progress.show("copying", 5, 10, "5 of 10 objects")
    input()
    progress.note("half of it is there")
    with progress.busy("measuring"):
        input()
print("done")
"""


def test_terminal_shows_bars_and_removes_them(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {"PYTHONPATH": str(Path(__file__).parents[3])}
    with terminal([sys.executable, str(tmp_path / "program.py")], environ) as shown:
        shown.wait_for("copying.*5 of 10 objects")
        shown.type("\n")
        shown.wait_for("half of it is there")
        shown.wait_for("measuring")
        shown.type("\n")
        shown.wait_for("done")
        assert shown.ended() == 0


def test_duration_is_formatted_in_a_suitable_unit() -> None:
    assert [duration(s) for s in (0.01, 75, 7_320)] == ["0.1 s", "1 min 15 s", "2 h 2 min"]
