"""`moonserve profile`: a real model, real copies, connections and disk, into a file that a simulation reads."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.doctor import transfer_checks
from deploy.local import LocalCluster
from deploy.profile import probe
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from traces.simulator.profiles import read_profile


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow is measured all the same."""
    monkeypatch.setattr(transfer_checks, "_DEADLINE_S", PATIENCE_S)
    monkeypatch.setattr(probe, "_REPORTED_WITHIN_S", PATIENCE_S)
    monkeypatch.setattr(LocalCluster.wait_until_ready, "__defaults__", (3 * PATIENCE_S,))
    monkeypatch.setattr(LocalCluster.stop, "__defaults__", (PATIENCE_S,))


def test_a_profile_is_measured_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tiny model, in a second: the file is the report, and what a simulation reads."""
    make_model("llama", model := tmp_path / "tiny", tie_word_embeddings=True)
    written = tmp_path / "profile.json"
    options = ["--json", str(written), "--disk", str(tmp_path), "--budget-s", "1"]
    assert main(["profile", str(model), *options, "--dtype", "float32", "--dram", "1MiB"]) == 0
    profile = read_profile(written)
    measured = json.loads(written.read_text())["measured"]
    assert profile.name == "tiny"
    assert profile.prefill.seconds(100, 0) > 0.0
    assert profile.decode.step_s(4, 100) > 0.0
    assert profile.dram_tokens == 2**20 // profile.kv_bytes_per_token
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
        (["no/such/model"], "neither a folder nor a hub name"),
        (["--disk", "/proc/self"], "--disk /proc/self"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *options]) == 2
    [*progress, told] = capsys.readouterr().err.strip().splitlines()
    assert words in told
    assert all(line.endswith("…") for line in progress)


def test_what_serving_adds_is_measured_through_a_real_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of the tiny model is started, asked and stopped; the file has what a simulation of it needs. Few bursts
    and short batches: how many there are is for the figures' sake."""
    for name, few in {"_BURSTS": 1, "_BURST": 3, "_STEADY_TOKENS": 16, "_BESIDE_S": 0.2}.items():
        monkeypatch.setattr(probe, name, few)
    monkeypatch.setattr(probe, "_PUTS_S", 0.0)
    shapes = {"prompt_tokens": (16, 64, 256, 512), "contexts": (64, 256), "runs": 1}
    monkeypatch.setattr(probe, "Grid", partial(probe.Grid, **shapes))
    make_model("llama", model := tmp_path / "tiny")
    # Beside other tests, workers that give way fall silent, and objectives are missed.
    for name, value in {"WORKER_NICE": "0", "TTFT_SLO": "10000", "TBT_SLO": "10000"}.items():
        monkeypatch.setenv(f"MOONSERVE_{name}", value)
    written = tmp_path / "serving.json"
    options = ["--json", str(written), "--disk", str(tmp_path), "--budget-s", "1", "--serving"]
    assert main(["profile", str(model), *options]) == 0
    profile = read_profile(written)
    assert profile.overheads.request_s > 0.0
    assert profile.overheads.landing_s > 0.0
    assert profile.prefill.seconds(512, 0) > 0.0
    assert profile.decode.step_s(8, 4096) > 0.0
    assert profile.crowding.prefill[0] == profile.crowding.decode[0] == 1.0
    printed = capsys.readouterr().out
    for words in ("request, beside its computing", "prefill beside 0, 1, … others"):
        assert words in printed
