"""Bursts whose first tokens come later than single terms explain: what is missing becomes the turnover."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.profile.calibration import calibrated
from deploy.profile.runs import Answered
from tests.deploy.profile.test_terms import DECODE, NEAR, PREFILL
from traces.simulator.spec import ClusterSpec, ModelProfile, Overheads

LENGTHS = (100, 300, 500, 700)
MODEL = ModelProfile(
    name="small",
    prefill=PREFILL,
    decode=DECODE,
    kv_bytes_per_token=1024,
    num_layers=4,
    nic_bytes_per_s=1e10,
    device_bytes_per_s=1e10,
    disk_bytes_per_s=1e9,
    device_tokens=100_000,
    dram_tokens=100_000,
    overheads=Overheads(request_s=0.005, turnover_s=0.1),
)
SPEC = ClusterSpec(model=MODEL, num_prefill=1, num_decode=1, block_size=32, policy="moonserve")


def burst(turnover_s: float) -> list[Answered]:
    """Prompts of one moment on one machine, one after the other, shortest first."""
    found: list[Answered] = []
    free_at = 0.005
    for tokens in LENGTHS:
        first_token_at = free_at + PREFILL.seconds(tokens, 0)
        found.append(
            Answered(
                machine="prefill-0",
                num_tokens=tokens,
                sent_at=0.0,
                placed_s=0.003,
                computes_from=free_at,
                computes_until=first_token_at,
                token_at=(first_token_at, first_token_at + 0.01),
            )
        )
        free_at = first_token_at + turnover_s
    return found


@pytest.mark.parametrize("turnover_s", [0.0, 0.004, 0.03])
def test_what_single_terms_do_not_explain_becomes_the_turnover(turnover_s: float) -> None:
    """Whatever it was before; nothing else changes."""
    found = calibrated(SPEC, [burst(turnover_s)] * 3)
    assert found.model.overheads.turnover_s == NEAR(turnover_s, abs=3e-4)
    overheads = replace(found.model.overheads, turnover_s=0.1)
    assert replace(found, model=replace(found.model, overheads=overheads)) == SPEC


def test_first_tokens_that_came_sooner_than_terms_say_leave_no_turnover() -> None:
    early = [replace(each, token_at=(0.001, 0.002)) for each in burst(0.0)]
    assert calibrated(SPEC, [early]).model.overheads.turnover_s == 0.0


def test_without_bursts_all_stays_as_it_was() -> None:
    assert calibrated(SPEC, []) is SPEC
