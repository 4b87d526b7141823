"""Tests of `moonserve profile`: it measures a real model, and derives a simulation's terms from observations."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.__main__ import main
from moonserve.deploy.diagnostics import doctor_network, profile_fit, profile_probe
from moonserve.deploy.diagnostics.profile_cluster import fit_turnover
from moonserve.deploy.diagnostics.profile_fit import BurstPrompt, Observations, PromptRun, StepRun, fit_terms, steps_of
from moonserve.deploy.diagnostics.profile_probe import steps_between
from moonserve.deploy.launcher.local_cluster import LocalCluster
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.latency import Timeline
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.traces.simulator.model_profiles import read_profile
from moonserve.traces.simulator.spec import ClusterSpec, Overheads
from tests.commands import Command
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from tests.traces.simulator.small import MODEL

NEAR = pytest.approx
CHUNK = 512
PREFILL = PrefillProfile(c0=2e-3, c1=5e-5, c2=5e-8)
DECODE = DecodeProfile(c0=2e-3, c1=1e-4, c2=4e-7)


def prompt(
    num_tokens: int, num_cached: int = 0, num_others: int = 0, slow: float = 1.0, with_decode: bool | None = None
) -> PromptRun:
    """Returns a run with PREFILL's times per chunk, 5 ms of request overhead (2 of them for the way back) and 2 ms of
    landing. Unless `with_decode` is given, other machines include a decode machine."""
    starts = range(num_cached, num_tokens, CHUNK)
    compute_s = slow * sum(PREFILL.seconds(min(s + CHUNK, num_tokens), s) for s in starts)
    return PromptRun(
        machine="prefill-0",
        num_tokens=num_tokens,
        num_cached=num_cached,
        num_others=num_others,
        with_decode=num_others > 0 if with_decode is None else with_decode,
        ttft_s=compute_s + 0.001 + 0.002 + 0.005,
        placed_s=0.003,
        queue_s=0.001,
        load_s=0.002,
        compute_s=compute_s,
        handoff_s=0.006,
    )


def step(num_seqs: int, context: int, num_others: int = 0, slow: float = 1.0) -> StepRun:
    return StepRun(
        num_seqs=num_seqs,
        prompt_tokens=context // num_seqs,
        context_tokens=context,
        num_others=num_others,
        seconds=slow * DECODE.step_s(num_seqs, context),
    )


def observed(**changes: object) -> Observations:
    values: dict[str, object] = {
        "prompts": [prompt(n, p) for n in (16, 300, 900, 4000) for p in (0, n // 2)],
        "steps": [step(b, b * c) for b in (1, 4, 16) for c in (64, 512, 1536)],
        "concurrent_prompts": [prompt(1024), prompt(1024, num_others=1, slow=1.25)],
    }
    return Observations(**{**values, **changes})  # type: ignore[arg-type]


def answered(
    machine: str,
    computes_from: float,
    first_token_at: float,
    *,
    step_s: float,
    num_steps: int,
    num_tokens: int = 500,
    placed_s: float = 0.004,
    queue_s: float = 0.0,
) -> BurstPrompt:
    """Returns an answer whose second token follows the first after a handoff of 20 ms and one step."""
    run = prompt(num_tokens)
    run = replace(run, machine=machine, placed_s=placed_s, queue_s=queue_s, load_s=0.0)
    second = first_token_at + 0.02 + step_s
    later = (second + step_s * number for number in range(num_steps))
    sent_at, compute_s = computes_from - placed_s - queue_s, first_token_at - computes_from
    return BurstPrompt(
        prompt=replace(run, compute_s=compute_s, ttft_s=first_token_at - sent_at),
        sent_at=sent_at,
        token_at=(first_token_at, *later),
    )


def test_a_fit_recovers_formulae_overheads_and_crowding() -> None:
    """The constant counts per chunk, so eight times for 4,000 tokens. In a burst of three, each prompt is placed 2 ms
    later for each other one; the last one queues, and its token returns 4 ms later than normally."""
    burst = [answered("p", 0.0, 0.1, step_s=0.0, num_steps=0, placed_s=0.007) for _ in range(2)]
    last = answered("p", 0.1, 0.2, step_s=0.0, num_steps=0, placed_s=0.007, queue_s=0.1)
    late = replace(last.prompt, ttft_s=last.prompt.ttft_s + 0.006)  # 2 ms of it are `back_s`
    found = fit_terms(observed(bursts=[[*burst, replace(last, prompt=late)]]), CHUNK)
    prefill, decode = found.prefill.profile, found.decode.profile
    assert (prefill.c0, prefill.c1, prefill.c2) == NEAR((2e-3, 5e-5, 5e-8))
    assert (decode.c0, decode.c1, decode.c2) == NEAR((2e-3, 1e-4, 4e-7))
    assert found.prefill.errors.max == NEAR(0.0, abs=1e-6)
    overheads = found.overheads
    assert (overheads.request_s, overheads.landing_s) == (NEAR(0.005), NEAR(0.002))
    assert (overheads.back_s, overheads.late_back_s) == (NEAR(0.002), NEAR(0.004))
    assert (overheads.handoff_s, overheads.gateway_s) == (NEAR(0.006), NEAR(0.002))
    assert found.crowding.prefill == NEAR((1, 1.25))


@given(slow=st.floats(0.5, 4.0), others=st.integers(1, 3))
def test_a_machine_that_is_always_slow_is_not_counted_as_crowding(slow: float, others: int) -> None:
    """The factors are right even if, since the formulae were measured, everything takes `slow` times as long."""
    prompts = [prompt(1024, num_others=n, slow=slow * (1 + n / 4)) for n in range(others + 1)]
    found = fit_terms(observed(concurrent_prompts=[replace(each, load_s=0.0) for each in prompts]), CHUNK)
    assert found.crowding.prefill == NEAR(tuple(1 + n / 4 for n in range(others + 1)))
    assert set(found.crowding.landing) == {1.0}


def test_different_machines_count_as_one_of_their_mean() -> None:
    """Prompts alone ran first on the faster machine, later on one that is 1.5 times as slow; crowding is relative."""
    fast = [prompt(n) for n in (16, 300, 900, 1024, 4000)]
    slow = [replace(prompt(1024, slow=1.5), machine="prefill-1")] * 3
    both = [prompt(1024, num_others=1, slow=2.0), prompt(1024, num_others=1)]
    both[1] = replace(both[1], machine="prefill-1", compute_s=3.0 * prompt(1024).compute_s)
    found = fit_terms(observed(prompts=fast, concurrent_prompts=[*slow, *both]), CHUNK)
    assert found.prefill.profile.c1 == NEAR(1.25 * 5e-5)
    assert found.crowding.prefill == NEAR((1.0, 2.0))


@pytest.mark.parametrize(
    ("others", "factors"),
    [
        ([prompt(1024), prompt(1024, num_others=2, slow=2.0)], (1.0,)),  # no sample with one other machine
        ([], ()),
        ([prompt(1024), prompt(1024, num_others=1, slow=0.8)], (1.0, 1.0)),  # a factor below 1 becomes 1
    ],
)
def test_factors_end_with_the_measurements_and_are_at_least_one(
    others: list[PromptRun], factors: tuple[float, ...]
) -> None:
    assert fit_terms(observed(concurrent_prompts=others), CHUNK).crowding.prefill == factors


def test_a_fit_without_measurements_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--budget-s"):
        fit_terms(observed(prompts=[prompt(64, 32)] * 4), CHUNK)


def test_steps_of_a_batch_are_counted_while_all_sequences_decode() -> None:
    """Two streams have steps of 10 ms, one a step later, and prompts of 100 tokens: the mean context is 209 tokens."""
    streams = [Timeline(0.0, tuple(0.01 * (n + ahead) for n in range(12))) for ahead in (0, 1)]
    (run,) = steps_between(streams, 100, 0.03, 0.07)
    assert (run.num_seqs, run.num_others, run.seconds) == (2, 0, NEAR(0.01))
    assert run.context_tokens == 100 + 5 + 100 + 4
    assert steps_between(streams, 100, 0.03, 0.05) == []


def test_tokens_that_reach_the_client_together_are_steps_if_time_passes() -> None:
    at_once = Timeline(0.0, (0.0, *[0.05] * 5, 0.1))
    assert steps_between([at_once], 100, 0.04, 0.06) == []
    bunches = Timeline(0.0, (0.0, *[0.05] * 5, *[0.1] * 5))  # two bunches of five steps of 10 ms
    assert [run.seconds for run in steps_between([bunches], 100, 0.0, 0.1)] == NEAR([0.01])


def gap_shares(*runs: StepRun) -> list[tuple[float, ...]]:
    return list(profile_fit._gaps(runs, DECODE))


def test_bunched_tokens_do_not_change_the_step_time() -> None:
    """Next to one other machine, tokens come in pairs: half of the gaps are 0, the others two steps. Of three streams,
    each with equal gaps, two get all tokens at once: their shares are near 0."""
    alone = replace(step(4, 1500), gaps_s=(0.01,) * 40)
    beside = replace(step(4, 1600, num_others=1, slow=1.5), seconds=0.02, gaps_s=(0.0, 0.04) * 40)
    gaps = gap_shares(alone, beside)
    assert [sum(each) / len(each) for each in gaps] == [NEAR(1.0), NEAR(1.0)]
    assert gaps[0] == NEAR((1.0,) * 40)
    assert gaps[1] == NEAR((0.0,) * 20 + (2.0,) * 20)
    at_once = replace(alone, seconds=1e-5, gaps_s=(1e-5,) * 20)
    (uneven,) = gap_shares(at_once, at_once, replace(alone, seconds=0.03, gaps_s=(0.03,) * 20))
    assert uneven[len(uneven) // 2] == NEAR(1e-3, abs=1e-4)


@given(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=200).filter(lambda g: sum(g) > 1e-3))
def test_the_longest_gaps_keep_their_share_of_the_time(gaps_s: list[float]) -> None:
    """Each half of the shares has the same part of the time as that half of the gaps, for any number of gaps."""
    (shares,) = gap_shares(replace(step(4, 1500), gaps_s=tuple(gaps_s) * 2))
    assert list(shares) == NEAR(sorted(shares))
    ordered = sorted(gaps_s * 2)
    longer_half = sum(ordered[len(gaps_s) :]) / sum(ordered)
    assert sum(shares[20:]) / sum(shares) == NEAR(longer_half)


def test_concurrent_prefill_and_decode_machines_have_separate_factors() -> None:
    runs = [prompt(1024), prompt(1024, num_others=1, slow=1.1, with_decode=False), prompt(1024, num_others=1, slow=1.5)]
    crowding = fit_terms(observed(concurrent_prompts=runs), CHUNK).crowding
    assert crowding.prefill == NEAR((1.0, 1.5))
    assert crowding.prefill_beside_prefills == NEAR((1.0, 1.1))
    assert crowding.landing_beside_prefills == NEAR((1.0, 1.0))


def test_steps_of_a_burst_are_grouped_by_the_machines_that_compute() -> None:
    """An answer with ten steps of 10 ms next to another prompt and ten of 5 ms alone gives two separate runs."""
    second = answered("prefill-0", 0.1, 0.23, step_s=0.005, num_steps=1)
    first = answered("prefill-0", 0.0, 0.1, step_s=0.01, num_steps=11)
    alone = tuple(first.token_at[-1] + 0.005 * (n + 1) for n in range(10))
    first = replace(first, token_at=first.token_at + alone)
    beside, after = sorted(steps_of([first, second]), key=lambda run: -run.num_others)
    assert (beside.num_others, after.num_others) == (1, 0)
    assert (beside.seconds, after.seconds) == (NEAR(0.01), NEAR(0.005))
    assert (beside.num_seqs, beside.prompt_tokens) == (1, 500)
    assert 500 < beside.context_tokens < after.context_tokens <= 521
    # Two concurrent streams, next to one machine with two prompts and another with one.
    streams = [answered(f"prefill-{n}", 0.0, 0.1, step_s=0.01, num_steps=20) for n in range(2)]
    others = [answered(f"prefill-{n % 2}", 0.1, 9.0, step_s=0.01, num_steps=1) for n in range(3)]
    runs = [run for run in steps_of([*streams, *others]) if run.num_seqs == 2]
    assert [(run.num_others, run.context_tokens > 1000) for run in runs] == [(2, True)] * 2
    assert steps_of([replace(first, token_at=(0.1, *[0.2] * 9))]) == []  # equal token times show no step


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_crowding_of_one_sequence_and_of_a_batch_are_separate(slow: float) -> None:
    """One or four answers decode while the longest prompt is computed; a handoff alone takes 6 ms."""
    bursts = []
    for num_seqs, factor in ((1, slow), (4, 2.0)):
        step_s = factor * DECODE.step_s(num_seqs, num_seqs * 510)
        streams = [answered("prefill-0", 0.0, 0.1, step_s=step_s, num_steps=20) for _ in range(num_seqs)]
        longest = answered("prefill-0", 0.1, 9.0, step_s=step_s, num_steps=1)
        bursts.append([*streams, longest])
    crowding = fit_terms(observed(bursts=bursts), CHUNK).crowding
    assert crowding.decode == NEAR((1.0, slow), rel=1e-2)
    assert crowding.decode_batch == NEAR((1.0, 2.0), rel=1e-2)
    assert crowding.handoff == NEAR((1.0, 0.02 / 0.006))


SERVED = replace(MODEL, prefill=PREFILL, decode=DECODE, overheads=Overheads(request_s=0.005, turnover_s=0.1))
SPEC = ClusterSpec(model=SERVED, num_prefill=1, num_decode=1, block_size=32, policy="moonserve")


def queued(turnover_s: float) -> list[BurstPrompt]:
    """Returns prompts that are sent at once to one machine and computed one by one, shortest first."""
    found: list[BurstPrompt] = []
    free_at = 0.005
    for tokens in (100, 300, 500, 700):
        first_token_at = free_at + PREFILL.seconds(tokens, 0)
        one = answered("prefill-0", free_at, first_token_at, step_s=0.01, num_steps=0, num_tokens=tokens)
        later = (first_token_at, first_token_at + 0.01)
        found.append(replace(one, sent_at=0.0, token_at=later))
        free_at = first_token_at + turnover_s
    return found


@pytest.mark.parametrize("turnover_s", [0.0, 0.004, 0.03])
def test_time_that_no_term_explains_becomes_the_turnover(turnover_s: float) -> None:
    """The turnover replaces the earlier value; nothing else changes, and without bursts nothing changes."""
    found = fit_turnover(SPEC, [queued(turnover_s)] * 3)
    assert found.model.overheads.turnover_s == NEAR(turnover_s, abs=3e-4)
    overheads = replace(found.model.overheads, turnover_s=0.1)
    assert replace(found, model=replace(found.model, overheads=overheads)) == SPEC
    assert fit_turnover(SPEC, []) is SPEC


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extends the timeouts, so that slow machines are measured too."""
    monkeypatch.setattr(doctor_network, "_DEADLINE_S", PATIENCE_S)
    monkeypatch.setattr(profile_probe, "_REPORTED_WITHIN_S", PATIENCE_S)
    monkeypatch.setattr(LocalCluster.wait_until_ready, "__defaults__", (3 * PATIENCE_S,))
    monkeypatch.setattr(LocalCluster.stop, "__defaults__", (PATIENCE_S,))


def test_a_profile_is_measured_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model is measured within a second; the file holds the measurements and is a valid profile."""
    make_model("llama", model := tmp_path / "tiny", tie_word_embeddings=True)
    written = tmp_path / "profile.json"
    options = ["--json", str(written), "--disk", str(tmp_path), "--budget-s", "1"]
    assert main(["profile", str(model), *options, "--dtype", "float32", "--dram", "1MiB"]) == 0
    profile = read_profile(written)
    measured = json.loads(written.read_text())["measured"]
    assert profile.name == "tiny"
    assert profile.prefill.seconds(100, 0) > 0.0
    assert profile.decode.step_s(4, 100) > 0.0
    assert profile.dram_tokens == round(0.875 * 2**20 / profile.kv_bytes_per_token)
    assert len(measured["prefill_points"]) == measured["prefill_errors"]["num_points"] >= 4
    assert len(measured["decode_points"]) == measured["decode_errors"]["num_points"] >= 4
    printed = capsys.readouterr().out
    for words in ("prefill, worst", "decode, worst", "tcp over loopback", "disk, reading"):
        assert words in printed
    assert f"{profile.decode.c1:.3e}" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--budget-s", "0"], "--budget-s"),
        (["--clock", "cpu", "--num-threads", "2"], "--num-threads 1"),
        (["--clock", "moon"], "--clock is one of"),
        (["--serving", "--clock", "cpu"], "--clock wall"),
        (["--engine", "vllm"], "--engine vllm needs --serving"),
        (["--serving", "--vllm.enforce-eager"], "--vllm.NAME needs --engine vllm"),
        (["no/such/model"], "neither a folder nor a hub name"),
        (["--disk", "/proc/self"], "--disk /proc/self"),
    ],
)
def test_impossible_measurement_is_reported(options: list[str], words: str, moonserve: Command) -> None:
    [*progress, told] = moonserve("profile", *options, ends=2).err.strip().splitlines()
    assert words in told
    assert all(line.endswith("…") for line in progress)


def test_overheads_of_serving_are_measured_through_a_real_cluster(
    tmp_path: Path, moonserve: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of a tiny model is measured, and the file has what its simulation needs. Bursts are few and batches
    short: larger numbers only make the figures more precise."""
    for name, few in {"_BURSTS": 1, "_BURST": 3, "_STEADY_TOKENS": 16, "_BESIDE_S": 0.2}.items():
        monkeypatch.setattr(profile_probe, name, few)
    monkeypatch.setattr(profile_probe, "_PUTS_S", 0.0)
    shapes = {"prompt_tokens": (16, 64, 256, 512), "contexts": (64, 256), "runs": 1}
    monkeypatch.setattr(profile_probe, "Grid", partial(profile_probe.Grid, **shapes))
    make_model("llama", model := tmp_path / "tiny")
    # Next to other tests, workers at low priority miss heartbeats, and requests miss their objectives.
    for name, value in {"WORKER_NICE": "0", "TTFT_SLO": "10000", "TBT_SLO": "10000"}.items():
        monkeypatch.setenv(f"MOONSERVE_{name}", value)
    written = tmp_path / "serving.json"
    options = ["--json", str(written), "--disk", str(tmp_path), "--budget-s", "1", "--serving"]
    printed = moonserve("profile", str(model), *options, ends=0).out
    profile = read_profile(written)
    assert profile.overheads.request_s > 0.0
    assert profile.overheads.landing_s == 0.0, "an idle worker computes while it requests a landing"
    assert profile.prefill.seconds(512, 0) > 0.0
    assert profile.decode.step_s(8, 4096) > 0.0
    assert profile.crowding.prefill[0] == profile.crowding.decode[0] == 1.0
    for words in ("request, beside its computing", "prefill beside 0, 1, … others"):
        assert words in printed
