"""Tests of the `moonserve` command: its verbs, their output, and one clear line for each error."""

import io
import json
import os
import re
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonserve.__main__ import VERBS
from moonserve.deploy.admin.explain import main as explain
from moonserve.deploy.admin.explain import show
from moonserve.deploy.admin.keys import main as keys
from moonserve.deploy.launcher.ports import free_port
from moonserve.deploy.terminal import EXIT_UNREACHABLE, Output, Table, bar, cluster_view, count, size
from moonserve.gateway.access import redis_stores
from moonserve.gateway.access.api_key import digest_of, new_key
from moonserve.gateway.access.key_file import read
from moonserve.protocol.errors import MoonserveError
from tests.commands import Command
from tests.patience import PATIENCE_S
from tests.redis_server import RedisServer


def test_help_lists_every_verb_and_verbs_have_help(moonserve: Command) -> None:
    printed = moonserve("--help", ends=0).out
    assert all(verb in printed for verb in VERBS)
    for verb in ("serve", "gateway", "conductor", "store"):
        assert "--port" in moonserve(verb, "--help", ends=0).out


PREFILL = ("worker", "--role", "prefill", "--instance-id", "p", "--model", "x")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serv"], "did you mean serve"),
        (["worker"], "--role"),
        (["worker", "--role", "x"], "--role"),
        (["worker", "--role-switching", "x"], "--role-switching"),
        (["worker", "--role=decode", "--conditional-disaggregation=x"], "--conditional"),
        ([*PREFILL, "--block-sise", "8"], "did you mean --block-size?"),
        ([*PREFILL, "--home-store", "store-0"], "--home-store needs --conductor"),
        (
            [*PREFILL, "--pipeline-parallel-size", "2", "--home-store", "s", "--conductor", "c:1"],
            "--home-store cannot be combined with --pipeline-parallel-size",
        ),
        ([*PREFILL, "--pipeline-parallel-size", "0"], "--pipeline-parallel-size must be at least 1"),
    ],
)
def test_wrong_usage_is_reported_in_one_line_with_exit_code_2(argv: list[str], hint: str, moonserve: Command) -> None:
    assert hint in moonserve(*argv, ends=2).err


@pytest.mark.parametrize(("argument", "is_read", "code"), [("--help", False, 141), ("serv", True, 2)])
def test_a_closed_pipe_ends_the_command_without_a_traceback(argument: str, is_read: bool, code: int) -> None:
    read_fd, write_fd = os.pipe()
    if not is_read:
        os.close(read_fd)  # before the command prints anything
    process = subprocess.Popen([sys.executable, "-m", "moonserve", argument], stdout=write_fd, stderr=subprocess.PIPE)
    os.close(write_fd)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, told.count(b"\n")) == (code, int(is_read))


def test_a_process_ends_with_its_code_after_all_functions_of_atexit() -> None:
    code = "import atexit, moonserve.__main__ as m; m.main = lambda: atexit.register(print, 'last') and 3; m.command()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "last\n")


BROKEN = '{"hidden_size": 1,\n oops'
MAMBA = json.dumps({"architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize(
    ("arguments", "config", "words"),
    [
        (["/no/such/model"], None, ["/no/such/model"]),
        (["{folder}"], BROKEN, ["config.json", "line 2"]),
        (["{folder}"], MAMBA, ["MambaForCausalLM", "LlamaForCausalLM"]),
        (["--port", "{port}"], None, ["--port"]),
        (["--prefil-workers", "2"], None, ["--prefill-workers"]),
    ],
)
def test_serve_reports_an_error_in_one_line_that_names_the_cause(
    arguments: list[str], config: str | None, words: list[str], tmp_path: Path, moonserve: Command
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        known = {"folder": tmp_path, "port": taken.getsockname()[1]}
        said = moonserve("serve", *(each.format(**known) for each in arguments), ends=2)
    assert not said.out
    [line] = said.err.strip().splitlines()
    assert all(word in line for word in words)


def test_numbers_have_a_fitting_unit_and_a_bar_shows_any_value_above_zero() -> None:
    shown = [size(number) for number in (0, 1023, 1024, 3 * 2**30, 2**54)]
    assert shown == ["0 B", "1023 B", "1.0 KiB", "3.0 GiB", "16384.0 TiB"]
    assert (count(1, "object"), count(2_000, "object")) == ("1 object", "2,000 objects")
    assert [bar(0.0), bar(0.001), bar(1.5)] == ["░" * 10, "█" + "░" * 9, "█" * 10]


def test_a_table_printed_in_portions_has_one_header_and_complete_cells() -> None:
    stdout = io.StringIO()
    table = Table(Output("kvctl", stdout=stdout), "name", ">bytes")
    for cells in (("a", "1"), ("much longer", "1,000")):
        table.add(*cells)
        table.flush()
    assert stdout.getvalue().splitlines() == ["name  bytes", "a         1", "much longer  1,000"]


CANDIDATE, DECODE_CANDIDATE, BOTH_PHASES, OUTCOME = yaml.safe_load("""
- {instance_id: p0, device_blocks: 1, prefix_blocks: 2, reuse_blocks: 3, load_s: 0.5, transfer_s: 0.5, queue_s: 0.5,
   prefill_s: 0.5, ttft_s: 0.5, added_s: 0.0}
- {instance_id: d0, landing_seqs: 4.0, landing_tokens: 900.0, free_blocks: 6, needed_blocks: 7, has_slot: true,
   fits: false, landing_tbt_s: 0.02}
- {instance_id: d0, reuse_blocks: 2, load_s: 0.0125, queue_s: 0.011, step_s: 0.02, added_s: 0.03, num_steps: 2,
   prefill_s: 0.1, ttft_s: 0.1125, keeps_slo: true}
- {phase: finished, ttft_s: 0.75, elapsed_s: 1.25, cached_tokens: 64, output_tokens: 11}
""")
DECISION: dict[str, Any] = yaml.safe_load("""
  {request_id: r, policy: global-cache-aware, balancing_threshold: 1.5, num_prompt_tokens: 100, best_blocks: 3,
   turn: {tenant: alice, weight: 2.0, ahead_tokens: 1500.0}, rank: 0.0, priority: 0, ttft_slo_s: 30.0, tbt_slo_s: 1.0,
   excluded_instances: [], undivided_candidates: [], is_undivided: false, prefill: p1, decode: d0,
   sources: [[store-0, 0, 3]], predicted_ttft_s: 0.5, predicted_tbt_s: 0.02, rejection: null, outcome: null}
""")
DECISION["prefill_candidates"] = [CANDIDATE, CANDIDATE | {"instance_id": "p1"}]
DECISION["decode_candidates"] = [DECODE_CANDIDATE]
UNKNOWN = {"queue_s": None, "transfer_s": None, "prefill_s": None}
KNOWN = {"queue_s": 0.1, "transfer_s": 0.2, "prefill_s": 0.3}
URGENT = {"tenant": "", "weight": 0.5, "ahead_tokens": 0.0}


@pytest.mark.parametrize(
    ("changes", "there", "absent"),
    [
        ({}, ["blocks 0 to 2 from store-0", "no: blocks", "in progress"], ["others wait", "copied"]),
        ({"tbt_range_s": [0.01, 0.025], "output_range": [3, 1200]},
         ["tenant alice, weight 2, 1,500 tokens ahead of who has had least\n", "10.0 ms to 25.0 ms", "3 to 1,200"], []),
        ({"turn": URGENT, "rank": -2.5, "priority": 3},
         ["(none), weight 0.5, 0 tokens ahead", "2.50 s before its arrival, priority 3\n"], []),
        ({"rejection": {"reason": "ttft", "retry_after_s": 2.5}}, ["rejected: ttft; again after 2.50 s"], []),
        ({"outcome": OUTCOME | UNKNOWN},
         ["TTFT 500.0 ms 30.00 s 750.0 ms", "TBT 20.0 ms 1.00 s 50.0 ms"], ["load and transfer"]),
        ({"outcome": OUTCOME | UNKNOWN | {"output_tokens": 1}}, ["TBT 20.0 ms 1.00 s -"], ["guessed"]),
        ({"outcome": OUTCOME | UNKNOWN | {"num_draft_tokens": 6, "num_accepted_tokens": 4}},
         ["was re-used; 4 of 6 guessed tokens were right\n"], []),
        ({"outcome": OUTCOME | KNOWN},
         ["queue 500.0 ms 100.0 ms", "load and transfer 1.00 s 200.0 ms", "compute 500.0 ms 300.0"], []),
        ({"prefill_candidates": [CANDIDATE | {"instance_id": "p1", "added_s": 1.5}]},
         ["others wait", "1.50 s"], []),
        ({"expected_return": "within 9.0 s, by the client's hint"},
         ["the session's next request is expected within 9.0 s, by the client's hint\n"], []),
        ({"request_id": "r~2", "excluded_instances": ["p0"]},
         ["r~2: 100 prompt tokens", "excluded, because they failed this request: p0"], []),
        ({"undivided_candidates": [BOTH_PHASES], "is_undivided": True, "outcome": OUTCOME | KNOWN},
         ["→ d0 2 11.0 ms 12.5 ms 2 20.0 ms 30.0 ms", "compute 100.0 ms 300.0 ms"], ["→ p1"]),
    ],
)  # fmt: skip
def test_explain_shows_a_decision_and_its_outcome(changes: dict[str, Any], there: list[str], absent: list[str]) -> None:
    """Each decision is printed as a separate section."""
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
    """Accepts one connection, reads a request, sends `said`, and closes."""
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
def test_a_port_of_another_protocol_and_an_incomplete_answer_count_as_no_answer(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        answered = threads.submit(answer_once, server, said)
        with pytest.raises(MoonserveError, match=f"no answer from {url}"):
            cluster_view(url, "")
        answered.result()


def test_a_missing_gateway_is_reported_with_its_address_and_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://localhost:80x", "nonsense", "http://127.0.0.1:9"):
        said = Command(capsys, explain, environ={"MOONSERVE_URL": url})("x", ends=EXIT_UNREACHABLE)
        (line,) = said.err.splitlines()
        assert f"no answer from {url}" in line
        assert "--url" in line


@pytest.mark.parametrize("place", ["file", "redis"])
def test_keys_are_added_listed_and_revoked(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key can be added, listed and revoked in a file and in Redis, even if Redis is slow."""
    monkeypatch.setattr(redis_stores, "DEADLINE_S", PATIENCE_S)
    run = Command(capsys, keys, environ={})
    if place == "file":
        is_kept(["--file", str(tmp_path / "keys.json")], run)
    else:
        with RedisServer() as server:
            is_kept(["--in-registry", "--registry", server.url], run)


def is_kept(place: list[str], run: Command) -> None:
    added = run("add", *place, "--tenant", "alice", "--requests-per-minute", "60", "--priority", "-2", ends=0)
    key = added.out.strip()
    assert key.startswith("msk-")
    assert "only time" in added.err
    [listed] = run("list", *place, "--json", ends=0).records
    assert (listed["tenant"], listed["requests_per_minute"], listed["priority"]) == ("alice", 60, -2)
    assert listed["key_id"] == digest_of(key.encode())[: len(listed["key_id"])]
    shown = run("list", *place, ends=0).out
    assert "alice" in shown
    assert key not in shown
    assert [run("revoke", *place, listed["key_id"]).code for _ in range(2)] == [0, 1]
    assert run("list", *place, ends=0).out == ""


def test_a_key_from_standard_input_must_not_be_guessable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, key = tmp_path / "keys.json", new_key()
    monkeypatch.setattr("sys.stdin", io.StringIO("password\n"))
    assert keys(["add", "--stdin", "--file", str(path)], {}) == 2
    assert not path.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n" * 3))
    for tenant in ("old", "bob"):  # a second `add` replaces the key's record
        environ = {"MOONSERVE_API_KEY_FILE": str(path)}
        assert keys(["add", "--stdin", "--tenant", tenant], environ) == 0
    assert [(k.digest, k.tenant) for k in read(path)] == [(digest_of(key.encode()), "bob")]
    assert key not in path.read_text()
    run = Command(capsys, keys, environ={})
    assert run("hash", ends=0).out.strip() == digest_of(key.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff" * 40), encoding="utf-8"))
    assert "printable ASCII" in run("hash", ends=2).err


def test_only_the_owner_reads_the_key_file_and_writers_lock_it(tmp_path: Path) -> None:
    place = ["--file", str(tmp_path / "keys.json")]
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda i: keys(["add", *place, "--note", str(i)], {}), range(16)))
    assert codes == [0] * 16
    assert {key.note for key in read(tmp_path / "keys.json")} == set(map(str, range(16)))
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        ("list", 2, "--file"),
        ("list --in-registry", 2, "--registry"),
        ("list --file x --in-registry", 2, "either"),
        ("list --file /nowhere/keys.json", 2, "No such file"),
        ("add --file /nowhere/keys.json", 2, "No such file"),
        ("add --file x --streams 0", 2, "streams"),
        ("list --in-registry --registry host:1", 2, "redis://"),
        ("list --in-registry --registry redis://127.0.0.1:{nobody}", 3, "cannot be reached"),
    ],
)
def test_wrong_usage_of_keys_is_reported_in_one_line(
    arguments: str, code: int, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Command(capsys, keys, environ={})(*arguments.format(nobody=free_port()).split(), ends=code).err
    assert hint in told
    assert told.count("\n") == 1
