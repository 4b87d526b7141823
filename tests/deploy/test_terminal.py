"""What commands about a running cluster print, and how they end where a gateway does not answer, or answers amiss."""

from __future__ import annotations

import io
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.remote.explain import main as explain
from deploy.remote.explain import show
from deploy.terminal.client import EXIT_UNREACHABLE, cluster_view
from deploy.terminal.output import Output, Table, bar, count, size
from protocol.errors import MoonserveError


def test_numbers_are_shown_in_the_unit_that_fits_and_a_bar_shows_whatever_is_above_nothing() -> None:
    shown = [size(number) for number in (0, 1023, 1024, 3 * 2**30, 2**54)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "3.0 GiB", "16384.0 TiB"]
    assert (count(1, "object"), count(2_000, "object")) == ("1 object", "2,000 objects")
    assert [bar(0.0), bar(0.001), bar(1.5)] == ["░" * 10, "█" + "░" * 9, "█" * 10]


def test_a_table_that_is_printed_in_portions_has_one_header_and_never_loses_text() -> None:
    stdout = io.StringIO()
    table = Table(Output("kvctl", stdout=stdout), "name", ">bytes")
    for cells in (("a", "1"), ("much longer", "1,000")):
        table.add(*cells)
        table.flush()
    assert stdout.getvalue().splitlines() == ["name  bytes", "a         1", "much longer  1,000"]


CANDIDATE = {"instance_id": "p0", "device_blocks": 1, "prefix_blocks": 2, "reuse_blocks": 3}
CANDIDATE |= {f"{name}_s": 0.5 for name in ("load", "transfer", "queue", "prefill", "ttft")}
CANDIDATE |= {"added_s": 0.0}
DECISION: dict[str, Any] = {
    "request_id": "r",
    "policy": "global-cache-aware",
    "balancing_threshold": 1.5,
    "num_prompt_tokens": 100,
    "best_blocks": 3,
    "turn": {"tenant": "alice", "weight": 2.0, "ahead_tokens": 1500.0},
    "rank": 0.0,
    "priority": 0,
    "ttft_slo_s": 30.0,
    "tbt_slo_s": 1.0,
    "excluded_instances": [],
    "prefill_candidates": [CANDIDATE, CANDIDATE | {"instance_id": "p1"}],
    "decode_candidates": [
        {
            "instance_id": "d0",
            "landing_seqs": 4.0,
            "landing_tokens": 900.0,
            "free_blocks": 6,
            "needed_blocks": 7,
            "has_slot": True,
            "fits": False,
            "landing_tbt_s": 0.02,
        }
    ],
    "undivided_candidates": [],
    "is_undivided": False,
    "prefill": "p1",
    "decode": "d0",
    "sources": [["store-0", 0, 3]],
    "predicted_ttft_s": 0.5,
    "predicted_tbt_s": 0.02,
    "rejection": None,
    "outcome": None,
}
OUTCOME = {"phase": "finished", "ttft_s": 0.75, "elapsed_s": 1.25, "cached_tokens": 64}
OUTCOME |= {"output_tokens": 11}
UNKNOWN = {"queue_s": None, "transfer_s": None, "prefill_s": None}
KNOWN = {"queue_s": 0.1, "transfer_s": 0.2, "prefill_s": 0.3}
URGENT = {"tenant": "", "weight": 0.5, "ahead_tokens": 0.0}
BOTH_PHASES = {
    "instance_id": "d0",
    "reuse_blocks": 2,
    "load_s": 0.0125,
    "queue_s": 0.011,
    "step_s": 0.02,
    "added_s": 0.03,
    "num_steps": 2,
    "prefill_s": 0.1,
    "ttft_s": 0.1125,
    "keeps_slo": True,
}


@pytest.mark.parametrize(
    ("changes", "there", "absent"),
    [
        ({}, ["blocks 0 to 2 from store-0", "no: blocks", "under way"], ["others wait", "copied"]),
        ({}, ["tenant alice, weight 2, 1,500 tokens ahead of who has had least\n"], []),
        ({"turn": URGENT, "rank": -2.5, "priority": 3},
         ["(none), weight 0.5, 0 tokens ahead", "2.50 s before its arrival, priority 3\n"], []),
        ({"rejection": {"reason": "ttft", "retry_after_s": 2.5}},
         ["rejected: ttft; again after 2.50 s"], []),
        ({"outcome": OUTCOME | UNKNOWN},
         ["TTFT 500.0 ms 30.00 s 750.0 ms", "TBT 20.0 ms 1.00 s 50.0 ms"], ["load and transfer"]),
        ({"outcome": OUTCOME | UNKNOWN | {"output_tokens": 1}}, ["TBT 20.0 ms 1.00 s -"], []),
        ({"outcome": OUTCOME | KNOWN},
         ["queue 500.0 ms 100.0 ms", "load and transfer 1.00 s 200.0 ms", "compute 500.0 ms 300.0"], []),
        ({"prefill_candidates": [CANDIDATE | {"instance_id": "p1", "added_s": 1.5}]},
         ["others wait", "1.50 s"], []),
        ({"request_id": "r~2", "excluded_instances": ["p0"]},
         ["r~2: 100 prompt tokens", "excluded, since they failed it: p0"], []),
        ({"undivided_candidates": [BOTH_PHASES], "is_undivided": True, "outcome": OUTCOME | KNOWN},
         ["→ d0 2 11.0 ms 12.5 ms 2 20.0 ms 30.0 ms", "compute 100.0 ms 300.0 ms"], ["→ p1"]),
    ],
)  # fmt: skip
def test_a_decision_is_explained_with_what_followed(
    changes: dict[str, Any], there: list[str], absent: list[str]
) -> None:
    """Each decision has a section."""
    shown = []
    for decisions in ([DECISION], [DECISION, {**DECISION, **changes}]):
        stdout = io.StringIO()
        show({"request_id": "r", "decisions": decisions}, Output("explain", stdout=stdout))
        shown.append(stdout.getvalue())
    assert [line.split()[1] for line in shown[0].splitlines() if line[:1] == "→"] == ["p1", "d0"]
    words = re.sub(" +", " ", shown[1].removeprefix(shown[0]))
    assert all(each in words for each in there)
    assert not any(each in words for each in absent)


def answer_once(server: socket.socket, said: bytes) -> None:
    """Reads a request, says this to it, and hangs up."""
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as request:
        while request.readline().strip():
            pass
        connection.sendall(said)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x12\x04",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\n{",
    ],
)
def test_a_port_of_another_protocol_and_a_broken_answer_are_no_answer(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        answered = threads.submit(answer_once, server, said)
        with pytest.raises(MoonserveError, match=f"no answer from {url}"):
            cluster_view(url, "")
        answered.result()


def test_no_gateway_is_one_line_that_names_the_address_and_how_to_give_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for url in ("http://localhost:80x", "nonsense", "http://127.0.0.1:9"):
        assert explain(["x"], {"MOONSERVE_URL": url}) == EXIT_UNREACHABLE
        (line,) = capsys.readouterr().err.splitlines()
        assert f"no answer from {url}" in line
        assert "--url" in line
