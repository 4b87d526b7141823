"""`moonserve doctor` on GPUs, RDMA ports, ports, disks and the registry: each is tried, and what lacks has a remedy."""

from __future__ import annotations

import json
import socket
from ipaddress import IPv6Address
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.doctor import gpu_checks, rdma_checks, service_checks
from deploy.doctor.findings import Finding, State
from engine.device import Gpu
from protocol.errors import ConfigError
from tests.ports import free_port
from tests.redis_server import RedisServer
from transfer.rdma.device import Gid, Port

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth1\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth2\t0000010A\t00000000\t0000\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def test_the_report_has_a_line_for_everything_that_a_cluster_stands_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", "--json", "--disk", str(tmp_path), "--port", str(free_port())]) == 0
    report = json.loads(capsys.readouterr().out)["findings"]
    assert {"software", "machine", "gpu", "surroundings", "rdma", "transports"} <= set(report)
    lines = {line["subject"]: line for line in report["surroundings"]}
    assert lines["disk"]["facts"]["read_bytes_s"] > 0
    assert lines["registry"]["state"] == "ok"
    assert not list(tmp_path.iterdir()), "the file that was read is gone"
    for line in (line for lines in report.values() for line in lines):
        assert line["state"] == "ok" or line["remedy"]


def test_a_port_that_is_taken_fails_only_where_it_was_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked, *_ = service_checks.check_ports("127.0.0.1", port)
    assert (asked.state, asked.subject) == (State.FAIL, f"port {port}")
    assert "--port" in asked.remedy
    free, chosen = service_checks.check_ports("127.0.0.1", port)
    assert free.state is State.OK
    assert chosen.facts["last"] > chosen.facts["first"]


def test_the_default_port_may_be_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(service_checks, "DEFAULT_PORT", taken.getsockname()[1])
        found, *_ = service_checks.check_ports("127.0.0.1", None)
    assert found.state is State.WARN


def test_too_few_ports_to_choose_from_are_a_warning() -> None:
    assert service_checks.chosen_ports(32768, 60999).state is State.OK
    assert service_checks.chosen_ports(32768, 33000).state is State.WARN


@pytest.mark.parametrize(
    ("free_bytes", "bytes_s", "state"),
    [
        (1 << 40, 2e9, State.OK),
        (1 << 40, None, State.OK),
        (1 << 20, 2e9, State.WARN),
        (1 << 40, 5e7, State.WARN),
    ],
)
def test_a_disk_needs_room_and_speed(free_bytes: int, bytes_s: float | None, state: State) -> None:
    assert service_checks.about_disk(Path("/data"), free_bytes, bytes_s).state is state


def test_a_folder_that_is_not_there_fails_where_it_was_asked_for(tmp_path: Path) -> None:
    found = service_checks.check_disk(tmp_path / "nowhere", measure=True)
    assert found.state is State.FAIL
    assert "No such file" in found.text


def test_a_registry_that_answers_is_told_from_one_that_does_not() -> None:
    with RedisServer() as redis:
        assert service_checks.check_registry(redis.url, "").state is State.OK
        gone = redis.url
    away = service_checks.check_registry(gone, "")
    assert away.state is State.FAIL
    assert "--registry" in away.remedy
    assert service_checks.check_registry("ftp://x", "").state is State.FAIL
    assert service_checks.check_registry(None, "").state is State.OK


@pytest.mark.parametrize(
    ("port", "state", "word"),
    [
        ({}, State.OK, "routes to 0.0.0.0/0, 10.0.0.0/24"),
        ({"netdev": "eth2"}, State.WARN, "ip route add"),
        ({"netdev": None}, State.WARN, "ip address add"),
        ({"state": "DOWN"}, State.WARN, "ip link set"),
        ({"netdev": "eth2", "is_ethernet": False}, State.OK, "InfiniBand"),
    ],
)
def test_an_rdma_port_is_judged_by_state_gid_and_route(
    port: dict[str, object], state: State, word: str
) -> None:
    found = rdma_checks.about_port(rdma_port(**port), ROUTES)
    assert found.state is state
    assert word in found.text + found.remedy


def rdma_port(state: str = "ACTIVE", netdev: str | None = "eth1", is_ethernet: bool = True) -> Port:
    gid = Gid(3, IPv6Address("::ffff:10.0.0.5").packed, "RoCE v2", netdev)
    return Port(
        device="mlx5_0",
        number=1,
        state=state,
        is_ethernet=is_ethernet,
        gid=None if netdev is None else gid,
        bandwidth_bytes_s=25e9,
        numa_node=0,
    )


def gpus(monkeypatch: pytest.MonkeyPatch, found: list[Gpu] | Exception) -> list[Finding]:
    def usable() -> list[Gpu]:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(gpu_checks, "count_gpus", lambda: 2)
    monkeypatch.setattr(gpu_checks, "usable_gpus", usable)
    return gpu_checks.check_gpus()


def test_each_gpu_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, busy = gpus(monkeypatch, [Gpu("H200", 140 << 30, 139 << 30), Gpu("H200", 140 << 30, 1)])
    assert (idle.state, busy.state) == (State.OK, State.WARN)
    assert "H200, 140.0 GiB" in idle.text
    assert "--gpu-memory-utilization" in busy.remedy


@pytest.mark.parametrize(
    "error", [ConfigError("this torch was built without CUDA"), ImportError("no torch")]
)
def test_gpus_that_cannot_be_used_say_why(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    [found] = gpus(monkeypatch, error)
    assert found.state is State.WARN
    assert "2 shown" in found.text
    assert "torch" in found.remedy


def test_a_machine_without_gpus_is_well() -> None:
    assert all(found.state is State.OK or found.remedy for found in gpu_checks.check_gpus())
