"""Tests of `moonserve doctor`: it reports working parts, problems with their remedies, and a matching exit code."""

import errno
import json
import re
import socket
from collections.abc import Callable
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from moonserve.__main__ import main
from moonserve.deploy.diagnostics import doctor_machine, doctor_network, doctor_services
from moonserve.deploy.diagnostics.doctor_findings import Finding, Severity, as_json, as_text
from moonserve.deploy.launcher.ports import free_port
from moonserve.engine.cuda.device import Gpu
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.membership.registry.redis_registry import RedisRegistry
from moonserve.transfer import TransferEngine, TransferOptions
from moonserve.transfer.rdma.device import Gid, Port, discover_ports
from tests.patience import PATIENCE_S
from tests.redis_server import RedisServer


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extends the doctor's timeouts of a few seconds, which a busy machine may exceed."""
    for limit in ("_CONNECT_S", "_HANDSHAKE_S", "_DEADLINE_S"):
        monkeypatch.setattr(doctor_network, limit, PATIENCE_S)
    monkeypatch.setattr(doctor_services, "_REGISTRY_S", PATIENCE_S)
    monkeypatch.setitem(RedisRegistry.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)


TOKEN = "token of the peer's cluster"
Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the doctor and returns its exit code and JSON report."""

    def run(*arguments: str, measures: bool = False) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", "--json", *([] if measures else ["--no-measure"]), *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


def finding(report: dict[str, Any], section: str, subject: str) -> dict[str, Any]:
    [found] = [entry for entry in report["findings"][section] if entry["subject"] == subject]
    return dict(found)


def test_doctor_examines_and_measures_everything_without_a_failure(doctor: Doctor, tmp_path: Path) -> None:
    code, report = doctor("--disk", str(tmp_path), "--port", str(free_port()), measures=True)
    assert code == 0
    assert {"software", "machine", "gpu", "surroundings", "rdma", "transports"} <= set(report["findings"])
    assert all(line["state"] == "ok" or line["remedy"] for lines in report["findings"].values() for line in lines)
    for transport in ("shm", "tcp"):
        words = r"READ \d+\.\d\d GB/s, 64 KiB in \d+ µs"
        assert re.search(words, finding(report, "transports", transport)["text"])
    assert "not used" not in finding(report, "rails", "lo")["text"]
    assert "reads" in finding(report, "surroundings", "disk")["text"]
    assert not list(tmp_path.iterdir()), "the file that was read is gone"
    assert "lo" in finding(report, "topology", "cpu:0")["text"]


@pytest.mark.skipif(bool(discover_ports()), reason="this machine has RDMA devices")
def test_missing_rdma_fails_only_if_it_is_requested(doctor: Doctor) -> None:
    code, report = doctor()
    assert (code, finding(report, "transports", "rdma")["state"]) == (0, "ok")
    assert finding(report, "rdma", "devices")["state"] == "ok"
    assert main(["doctor", "--transports", "tpc"]) == 2
    code, report = doctor("--transports", "rdma,tcp")
    asked = finding(report, "transports", "rdma")
    assert (code, asked["state"], bool(asked["remedy"])) == (1, "fail", True)


def test_a_rail_of_another_machine_fails(doctor: Doctor) -> None:
    code, report = doctor("--transfer-rails", "192.0.2.77")
    assert code == 1
    assert "192.0.2.77 is not an address of this machine" in finding(report, "rails", "rails")["text"]
    assert finding(report, "transports", "tcp")["state"] == "fail"


@pytest.mark.parametrize(
    ("token", "code", "subject", "key", "words"),
    [
        (TOKEN, 0, "tcp handshake", "text", "authenticated; 1 readable segment"),
        (TOKEN, 0, "shm handshake", "text", "authenticated; 1 readable segment"),
        ("another", 1, "tcp handshake", "remedy", "MOONSERVE_CLUSTER_TOKEN"),
        (None, 0, "handshake", "text", "not tried"),
    ],
)
def test_a_peer_is_reached_on_each_endpoint_and_accepts_only_its_token(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch,
    token: str | None, code: int, subject: str, key: str, words: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("MOONSERVE_CLUSTER_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("MOONSERVE_CLUSTER_TOKEN", token)
    with TransferEngine(cluster_token=TOKEN, name="peer") as peer:
        peer.allocate(4096, readable=True)
        found, report = doctor("--peer", peer.address)
    assert found == code
    assert "on this host" in finding(report, "peer", "shm")["text"]
    assert " on lo " in finding(report, "peer", "tcp lo")["text"]
    assert words in finding(report, "peer", subject)[key]


def test_a_peer_that_has_ended_fails_on_each_requested_endpoint(doctor: Doctor) -> None:
    with TransferEngine(cluster_token=TOKEN) as gone:
        address = gone.address
    code, report = doctor("--peer", address)
    assert (code, finding(report, "peer", "shm")["state"]) == (1, "fail")
    assert "refused" in finding(report, "peer", "tcp lo")["text"]
    _, report = doctor("--peer", address, "--transports", "tcp")
    assert finding(report, "peer", "shm")["state"] == "warn"


def test_a_peer_given_as_host_and_port_is_dialled(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        assert finding(doctor("--peer", where)[1], "peer", "tcp")["state"] == "ok"
    code, report = doctor("--peer", where)
    assert (code, "refused" in finding(report, "peer", "tcp")["text"]) == (1, True)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("ms9;id=00;host=x", "same version"),
        ("nonsense", "whole address"),
        ("ms2;id=zz;host=x", "whole address"),
        ("127.0.0.1:99999", "port below 65536"),
    ],
)
def test_an_invalid_peer_address_has_its_own_remedy(doctor: Doctor, address: str, remedy: str) -> None:
    code, report = doctor("--peer", address)
    (entry,) = report["findings"]["peer"]
    assert code == 1
    assert remedy in entry["remedy"]


def test_a_peer_on_another_machine_needs_no_shared_memory(doctor: Doctor) -> None:
    with TransferEngine(cluster_token=TOKEN, options=TransferOptions(transports=("tcp",))) as peer:
        parts = ["host=elsewhere" if part.startswith("host=") else part for part in peer.address.split(";")]
        code, report = doctor("--peer", ";".join([*parts, "shm=shm@nowhere"]))
    assert (code, finding(report, "peer", "shm")["state"]) == (0, "ok")


def test_the_text_ends_with_all_problems_and_json_has_the_same_findings() -> None:
    findings = [
        Finding("machine", "cores", "2 of 2"),
        Finding("machine", "memory", "1 GiB", "buy some"),
        Finding("transports", "rdma", "no device", "plug one in", fails=True),
    ]
    lines = list(as_text(findings))
    assert "  ok    cores   2 of 2" in lines
    assert "  fail  rdma    no device" in lines
    assert any("→ plug one in" in line for line in lines)
    assert lines[-2:] == ["could be better: machine: memory", "does not work: transports: rdma"]
    assert list(as_text(findings[:1]))[-1] == "everything that was asked for works"
    told = as_json(findings)
    assert not told["healthy"]
    cores, memory = told["findings"]["machine"]
    assert cores == {"subject": "cores", "state": "ok", "text": "2 of 2"}
    assert memory == {"subject": "memory", "state": "warn", "text": "1 GiB", "remedy": "buy some"}


OK, WARN, FAIL = Severity.OK, Severity.WARN, Severity.FAIL
NO_CAPABILITY, ALL_CAPABILITIES = "CapEff:\t0000000000000000", "CapEff:\t000001ffffffffff"
LARGE = "MemTotal: 99999999 kB\nMemAvailable: 99999999 kB"
ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth2\t0000010A\t00000000\t0000\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (doctor_machine._cores(4, 8, "100000 100000"), WARN, "at least 2"),
        (doctor_machine._cores(1, 8, ""), WARN, "at least 2"),
        (doctor_machine._cores(4, 8, "max 100000"), OK, ""),
        (doctor_machine._cores(4, 8, "250000 100000"), OK, "2.5"),
        (doctor_machine._memory("MemTotal: 1000 kB\nMemAvailable: 900 kB", "max"), WARN, "--dram"),
        (doctor_machine._memory(LARGE, "1000000"), WARN, "--dram"),
        (doctor_machine._memory(LARGE, "max"), OK, ""),
        (doctor_machine._locked_memory(8 << 20, NO_CAPABILITY, rdma_wanted=True), WARN, "ulimit"),
        (doctor_machine._locked_memory(8 << 20, NO_CAPABILITY, rdma_wanted=False), OK, ""),
        (doctor_machine._locked_memory(8 << 20, ALL_CAPABILITIES, rdma_wanted=True), OK, "IPC"),
        (doctor_machine._locked_memory(-1, "", rdma_wanted=True), OK, "unlimited"),
        (doctor_machine._files(1024, 1_048_576), WARN, "ulimit -n 65536"),
        (doctor_machine._files(65536, 65536), OK, ""),
        (doctor_machine._features("flags\t\t: avx2 fma\n\nflags\t\t: fpu avx2 fma\n"), OK, "avx2"),
        (doctor_machine._features("model name: x\nflags\t\t: fpu sse2\n"), WARN, "AVX2"),
        (doctor_services.ephemeral_ports_finding(32768, 60999), OK, ""),
        (doctor_services.ephemeral_ports_finding(32768, 33000), WARN, "sysctl"),
        (doctor_services.disk_finding(Path("/data"), 1 << 40, 2e9), OK, "2.00 GB/s"),
        (doctor_services.disk_finding(Path("/data"), 1 << 40, None), OK, ""),
        (doctor_services.disk_finding(Path("/data"), 1 << 20, 2e9), WARN, "make room"),
        (doctor_services.disk_finding(Path("/data"), 1 << 40, 5e7), WARN, "too slow"),
        (doctor_services.check_disk(Path("/nowhere"), measure=True), FAIL, "No such file"),
        (doctor_network.unreachable_finding("tcp", "p:1", TimeoutError("timed out")), FAIL, "firewall"),
        (doctor_network.unreachable_finding("tcp", "p:1", OSError(errno.ETIMEDOUT, "")), FAIL, "firewall"),
        (doctor_network.unreachable_finding("tcp", "p:1", OSError(errno.ENETUNREACH, "")), FAIL, "--host"),
        (doctor_network.unreachable_finding("tcp", "p:1", OSError(errno.EHOSTUNREACH, "")), FAIL, "is the peer"),
        (doctor_network.unreachable_finding("tcp", "p:1", socket.gaierror(-2, "?")), FAIL, "host name"),
    ],
)
def test_a_shortage_is_reported_with_a_remedy(found: Finding, state: Severity, words: str) -> None:
    assert found.state is state
    assert words in found.text + found.remedy


def test_a_port_in_use_fails_only_if_it_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(doctor_services, "DEFAULT_PORT", port)
    with socket.create_server(("127.0.0.1", port)):
        asked, *_ = doctor_services.check_ports("127.0.0.1", port)
        by_default, *_ = doctor_services.check_ports("127.0.0.1", None)
    assert (asked.state, asked.subject) == (FAIL, f"port {port}")
    assert "--port" in asked.remedy
    assert by_default.state is WARN
    free, *_ = doctor_services.check_ports("127.0.0.1", port)
    assert free.state is OK


def test_only_a_registry_that_answers_is_ok() -> None:
    with RedisServer() as redis:
        assert doctor_services.check_registry(redis.url, "").state is OK
        gone = redis.url
    away = doctor_services.check_registry(gone, "")
    assert (away.state, "--registry" in away.remedy) == (FAIL, True)
    assert doctor_services.check_registry("ftp://x", "").state is FAIL
    assert doctor_services.check_registry(None, "").state is OK


@pytest.mark.parametrize(
    ("port", "state", "word"),
    [
        ({}, OK, "routes to 0.0.0.0/0, 10.0.0.0/24"),
        ({"netdev": "eth2"}, WARN, "ip route add"),
        ({"netdev": None}, WARN, "ip address add"),
        ({"state": "DOWN"}, WARN, "ip link set"),
        ({"netdev": "eth2", "is_ethernet": False}, OK, "InfiniBand"),
    ],
)
def test_an_rdma_port_needs_an_active_state_a_gid_and_a_route(port: dict[str, Any], state: Severity, word: str) -> None:
    netdev = port.pop("netdev", "eth1")
    gid = None if netdev is None else Gid(3, IPv6Address("::ffff:10.0.0.5").packed, "RoCE v2", netdev)
    known = {"device": "mlx5_0", "number": 1, "bandwidth_bytes_s": 25e9, "numa_node": 0, "gid": gid}
    made = Port(**known, **{"state": "ACTIVE", "is_ethernet": True, **port})
    found = doctor_machine.port_finding(made, ROUTES)
    assert found.state is state
    assert word in found.text + found.remedy


@pytest.mark.parametrize(
    ("gpus", "state", "words"),
    [
        ([Gpu("H200", 140 << 30, 139 << 30)], OK, "H200, 140.0 GiB"),
        ([Gpu("H200", 140 << 30, 1)], WARN, "--gpu-memory-utilization"),
        (ConfigError("this torch was built without CUDA"), WARN, "built without CUDA"),
        (ImportError("no torch"), WARN, "pip install torch"),
    ],
)
def test_gpus_are_listed_or_the_reason_why_none_is_used(
    monkeypatch: pytest.MonkeyPatch, gpus: Any, state: Severity, words: str
) -> None:
    monkeypatch.setattr(doctor_machine, "count_gpus", lambda: 2)
    monkeypatch.setattr(doctor_machine, "usable_gpus", Mock(side_effect=[gpus]))
    [found] = doctor_machine.check_gpus()
    assert found.state is state
    assert words in found.text + found.remedy
