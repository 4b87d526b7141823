"""A log line says whose it is, in both forms, and what a call adds to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from protocol import logs
from protocol.logs import of, of_all

log = logging.getLogger("some.module")


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """The test run's own handlers and level come back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_json_has_a_line_for_each_record_with_what_was_added(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("decode-0", log_format="json", level="info")
    log.info("landed: %d blocks", 3, extra={**of("req-1"), "seconds": 0.5})
    log.debug("not asked for")
    [line] = map(json.loads, lines(capsys))
    assert line["message"] == "landed: 3 blocks"
    assert (line["level"], line["instance"], line["logger"]) == ("info", "decode-0", "some.module")
    assert (line["request_id"], line["seconds"]) == ("req-1", 0.5)


def test_an_exception_is_in_the_line_that_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("decode-0", log_format="json", level="info")
    try:
        raise RuntimeError("no memory")
    except RuntimeError:
        log.exception("a step failed", extra=of_all(["req-1", "req-2"]))
    [line] = map(json.loads, lines(capsys))
    assert line["request_ids"] == ["req-1", "req-2"]
    assert line["exception"].endswith("RuntimeError: no memory")


def test_for_people_the_id_stands_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("100%-sure", log_format="human", level="info")
    log.warning("given up: no blocks", extra=of("req-1"))
    log.warning("a step failed", extra=of_all(["req-1", "req-2"]))
    log.warning("nobody's")
    one, two, none = lines(capsys)
    assert one.endswith("W 100%-sure some.module: given up: no blocks request_id=req-1")
    assert two.endswith("a step failed request_ids=req-1,req-2")
    assert none.endswith("some.module: nobody's")


def test_debugging_us_does_not_mean_debugging_what_we_use(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway-0", log_format="human", level="debug")
    logging.getLogger("asyncio").debug("Using selector: EpollSelector")
    log.debug("placed")
    assert [line.rpartition(": ")[2] for line in lines(capsys)] == ["placed"]
    logs.configure("gateway-0", log_format="human", level="error")
    logging.getLogger("asyncio").warning("slow")
    assert not lines(capsys)
