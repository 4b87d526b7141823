"""What `moonserve doctor` makes of a machine, its devices and its surroundings: what lacks has a remedy."""

from __future__ import annotations

import errno
import socket
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor import device_checks, machine_checks, peer_checks, service_checks
from deploy.doctor.findings import Finding, State
from deploy.ports import free_port
from engine.device import Gpu
from protocol.errors import ConfigError
from tests.redis_server import RedisServer
from transfer.rdma.device import Gid, Port

OK, WARN, FAIL = State.OK, State.WARN, State.FAIL
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
        (machine_checks._cores(4, 8, "100000 100000"), WARN, "at least 2"),
        (machine_checks._cores(1, 8, ""), WARN, "at least 2"),
        (machine_checks._cores(4, 8, "max 100000"), OK, ""),
        (machine_checks._cores(4, 8, "250000 100000"), OK, "2.5"),
        (machine_checks._memory("MemTotal: 1000 kB\nMemAvailable: 900 kB", "max"), WARN, "--dram"),
        (machine_checks._memory(LARGE, "1000000"), WARN, "--dram"),
        (machine_checks._memory(LARGE, "max"), OK, ""),
        (machine_checks._locked_memory(8 << 20, NO_CAPABILITY, rdma_wanted=True), WARN, "ulimit"),
        (machine_checks._locked_memory(8 << 20, NO_CAPABILITY, rdma_wanted=False), OK, ""),
        (machine_checks._locked_memory(8 << 20, ALL_CAPABILITIES, rdma_wanted=True), OK, "IPC"),
        (machine_checks._locked_memory(-1, "", rdma_wanted=True), OK, "unlimited"),
        (machine_checks._files(1024, 1_048_576), WARN, "ulimit -n 65536"),
        (machine_checks._files(65536, 65536), OK, ""),
        (machine_checks._features("flags\t\t: avx2 fma\n\nflags\t\t: fpu avx2 fma\n"), OK, "avx2"),
        (machine_checks._features("model name: x\nflags\t\t: fpu sse2\n"), WARN, "AVX2"),
        (service_checks.chosen_ports(32768, 60999), OK, ""),
        (service_checks.chosen_ports(32768, 33000), WARN, "sysctl"),
        (service_checks.about_disk(Path("/data"), 1 << 40, 2e9), OK, "2.00 GB/s"),
        (service_checks.about_disk(Path("/data"), 1 << 40, None), OK, ""),
        (service_checks.about_disk(Path("/data"), 1 << 20, 2e9), WARN, "make room"),
        (service_checks.about_disk(Path("/data"), 1 << 40, 5e7), WARN, "too slow"),
        (service_checks.check_disk(Path("/nowhere"), measure=True), FAIL, "No such file"),
        (peer_checks.unreached("tcp", "p:1", TimeoutError("timed out")), FAIL, "firewall"),
        (peer_checks.unreached("tcp", "p:1", OSError(errno.ETIMEDOUT, "")), FAIL, "firewall"),
        (peer_checks.unreached("tcp", "p:1", OSError(errno.ENETUNREACH, "")), FAIL, "--host"),
        (peer_checks.unreached("tcp", "p:1", OSError(errno.EHOSTUNREACH, "")), FAIL, "is the peer"),
        (peer_checks.unreached("tcp", "p:1", socket.gaierror(-2, "?")), FAIL, "host name"),
    ],
)
def test_what_is_short_is_told_with_advice(found: Finding, state: State, words: str) -> None:
    assert found.state is state
    assert words in found.text + found.remedy


def test_a_port_that_is_taken_fails_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(service_checks, "DEFAULT_PORT", port)
    with socket.create_server(("127.0.0.1", port)):
        asked, *_ = service_checks.check_ports("127.0.0.1", port)
        by_default, *_ = service_checks.check_ports("127.0.0.1", None)
    assert (asked.state, asked.subject) == (FAIL, f"port {port}")
    assert "--port" in asked.remedy
    assert by_default.state is WARN
    free, *_ = service_checks.check_ports("127.0.0.1", port)
    assert free.state is OK


def test_a_registry_that_answers_is_told_from_one_that_does_not() -> None:
    with RedisServer() as redis:
        assert service_checks.check_registry(redis.url, "").state is OK
        gone = redis.url
    away = service_checks.check_registry(gone, "")
    assert (away.state, "--registry" in away.remedy) == (FAIL, True)
    assert service_checks.check_registry("ftp://x", "").state is FAIL
    assert service_checks.check_registry(None, "").state is OK


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
def test_an_rdma_port_is_judged_by_state_gid_and_route(port: dict[str, Any], state: State, word: str) -> None:
    netdev = port.get("netdev", "eth1")
    gid = Gid(3, IPv6Address("::ffff:10.0.0.5").packed, "RoCE v2", netdev)
    made = Port(
        device="mlx5_0",
        number=1,
        state=port.get("state", "ACTIVE"),
        is_ethernet=port.get("is_ethernet", True),
        gid=None if netdev is None else gid,
        bandwidth_bytes_s=25e9,
        numa_node=0,
    )
    found = device_checks.about_port(made, ROUTES)
    assert found.state is state
    assert word in found.text + found.remedy


@pytest.mark.parametrize(
    ("gpus", "states", "words"),
    [
        ([Gpu("H200", 140 << 30, 139 << 30)], [OK], "H200, 140.0 GiB"),
        ([Gpu("H200", 140 << 30, 1)], [WARN], "--gpu-memory-utilization"),
        (ConfigError("this torch was built without CUDA"), [WARN], "built without CUDA"),
        (ImportError("no torch"), [WARN], "pip install torch"),
    ],
)
def test_gpus_are_named_with_their_memory_or_why_they_are_not_used(
    monkeypatch: pytest.MonkeyPatch, gpus: Any, states: list[State], words: str
) -> None:
    def usable() -> list[Gpu]:
        if isinstance(gpus, Exception):
            raise gpus
        found: list[Gpu] = gpus
        return found

    monkeypatch.setattr(device_checks, "count_gpus", lambda: 2)
    monkeypatch.setattr(device_checks, "usable_gpus", usable)
    found = device_checks.check_gpus()
    assert [each.state for each in found] == states
    assert words in found[0].text + found[0].remedy
