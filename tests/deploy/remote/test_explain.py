"""`moonserve explain`: what it makes of records, and how it ends without a gateway."""

from __future__ import annotations

import io
from typing import Any

import pytest

from deploy.remote import explain
from deploy.remote.explanation import actual, show
from deploy.terminal.endings import EXIT_UNREACHABLE
from deploy.terminal.output import Output
from tests.ports import free_port


def decision(**changes: Any) -> dict[str, Any]:
    prefill = {"instance_id": "p0", "device_blocks": 1, "prefix_blocks": 2, "reuse_blocks": 3}
    terms = {f"{name}_s": 0.5 for name in ("load", "transfer", "queue", "prefill", "ttft")}
    terms["added_s"] = 0.0
    decode = {
        "instance_id": "d0",
        "num_seqs": 3.0,
        "landing_seqs": 4.0,
        "landing_tokens": 900.0,
        "context_tokens": 5000,
        "free_blocks": 6,
        "needed_blocks": 7,
        "has_slot": True,
        "fits": False,
        "tbt_s": 0.019,
        "landing_tbt_s": 0.02,
    }
    record = {
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
        "prefill_candidates": [prefill | terms, prefill | terms | {"instance_id": "p1"}],
        "decode_candidates": [decode],
        "undivided_candidates": [],
        "is_undivided": False,
        "prefill": "p1",
        "decode": "d0",
        "sources": [["store-0", 0, 3]],
        "replica_blocks": 0,
        "predicted_ttft_s": 0.5,
        "predicted_tbt_s": 0.02,
        "rejection": None,
        "outcome": None,
    }
    return record | changes


def shown(*decisions: dict[str, Any]) -> str:
    stdout = io.StringIO()
    show({"request_id": "r", "decisions": decisions}, Output("explain", stdout=stdout))
    return stdout.getvalue()


def test_the_chosen_are_marked_and_sources_are_named() -> None:
    text = shown(decision())
    assert [line.split()[1] for line in text.splitlines() if line.startswith("→")] == ["p1", "d0"]
    assert "blocks 0 to 2 from store-0" in text
    assert "no: blocks" in text
    assert "under way" in text


def test_a_rejection_says_why_and_when_to_come_back() -> None:
    text = shown(decision(rejection={"reason": "ttft", "retry_after_s": 2.5}))
    assert "rejected: ttft; again after 2.50 s" in text


def test_a_tenants_turn_is_told_and_what_it_does_to_the_place() -> None:
    text = shown(decision())
    assert "tenant alice, weight 2, 1,500 tokens ahead of who has had least\n" in text
    turn = {"tenant": "", "weight": 0.5, "ahead_tokens": 0.0}
    text = shown(decision(turn=turn, rank=-2.5, priority=3))
    assert "tenant (none), weight 0.5, 0 tokens ahead" in text
    assert "least, 2.50 s before its arrival, priority 3\n" in text


def test_predicted_stands_beside_actual() -> None:
    outcome = {"phase": "finished", "ttft_s": 0.75, "elapsed_s": 1.25, "cached_tokens": 64,
               "output_tokens": 11, "queue_s": None, "transfer_s": None, "prefill_s": None}  # fmt: skip
    text = shown(decision(outcome=outcome))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "ms" in line}
    assert rows["TTFT"] == ["500.0", "ms", "30.00", "s", "750.0", "ms"]
    assert rows["TBT"] == ["20.0", "ms", "1.00", "s", "50.0", "ms"]


def test_the_parts_of_a_first_token_are_shown_as_predicted_and_as_they_were() -> None:
    outcome = {"phase": "finished", "ttft_s": 0.75, "elapsed_s": 1.25, "cached_tokens": 64,
               "output_tokens": 11, "queue_s": 0.1, "transfer_s": 0.2, "prefill_s": 0.3}  # fmt: skip
    text = shown(decision(outcome=outcome))
    rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
    assert ["queue", "500.0", "ms", "100.0", "ms"] in rows
    assert ["load", "and", "transfer", "1.00", "s", "200.0", "ms"] in rows
    assert ["compute", "500.0", "ms", "300.0", "ms"] in rows
    assert "load and transfer" not in shown(decision())


def test_what_others_wait_is_shown_where_the_policy_counts_it() -> None:
    assert "others wait" not in shown(decision())
    [first, second] = decision()["prefill_candidates"]
    counted = shown(decision(prefill_candidates=[first, second | {"added_s": 1.5}]))
    assert "others wait" in counted
    assert "1.50 s" in counted


def test_copied_blocks_among_the_sources_are_said() -> None:
    assert "copied" not in shown(decision())
    assert "2 blocks of these were copied there" in shown(decision(replica_blocks=2))


def test_one_token_has_no_time_between_tokens() -> None:
    assert actual({"ttft_s": 0.5, "elapsed_s": 0.5, "output_tokens": 1}) == (0.5, None)
    assert actual({"ttft_s": None, "elapsed_s": None, "output_tokens": None}) == (None, None)


def test_every_attempt_has_its_section() -> None:
    retried = decision(request_id="r~2", excluded_instances=["p0"])
    text = shown(decision(), retried)
    assert "r: 100 prompt tokens" in text
    assert "r~2: 100 prompt tokens" in text
    assert "excluded, since they failed it: p0" in text


def test_no_gateway_is_one_line_that_names_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert explain.main(["x", "--url", url], {}) == EXIT_UNREACHABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line
    assert "--url" in line


def test_the_address_may_be_in_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["x"], {"MOONSERVE_URL": "nonsense"}) == EXIT_UNREACHABLE
    assert "nonsense" in capsys.readouterr().err


def test_a_decode_worker_that_prefilled_is_marked_and_its_terms_are_shown() -> None:
    there = {
        "instance_id": "d0",
        "device_blocks": 0,
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
    outcome = {
        "phase": "finished", "ttft_s": 0.12, "elapsed_s": 1.0, "cached_tokens": 64, "output_tokens": 5,
        "queue_s": 0.01, "transfer_s": 0.012, "prefill_s": 0.098,
    }  # fmt: skip
    text = shown(decision(undivided_candidates=[there], is_undivided=True, outcome=outcome))
    lines = [line.split() for line in text.splitlines()]
    assert ["→", "d0", "2", "11.0", "ms", "12.5", "ms", "2", "20.0", "ms", "30.0", "ms"] in [
        line[:12] for line in lines
    ]
    assert not any(line[:2] == ["→", "p1"] for line in lines)
    assert ["compute", "100.0", "ms", "98.0", "ms"] in lines
