"""What is read from sysfs and the kernel, on machines built from files: RDMA ports and TCP rails."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from transfer.address import Rail
from transfer.paths.discovery import (
    InterfaceAddress,
    bandwidth_of,
    local_tcp_rails,
    owner_of,
    reachable_addresses,
    read_addresses,
    tcp_rails,
)
from transfer.rdma.device import best_gid, choose, discover

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0001"
UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"
Gids = list[tuple[str, str]]


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def add_rdma(
    sysfs: Path, name: str, gids: Gids, state: str = "4: ACTIVE", link_layer: str = "Ethernet"
) -> None:
    port = sysfs / "class/infiniband" / name / "ports/1"
    write(port, state=state, link_layer=link_layer, rate="100 Gb/sec (4X EDR)")
    for index, (gid, kind) in enumerate(gids):
        write(port / "gids", **{str(index): gid})
        if gid != UNUSED:
            write(port / "gid_attrs/types", **{str(index): kind})
            write(port / "gid_attrs/ndevs", **{str(index): "eth0"})


@pytest.mark.parametrize(
    ("gids", "options", "ip"),
    [
        (
            [
                (LINK_LOCAL, "IB/RoCE v1"),
                (LINK_LOCAL, "RoCE v2"),
                (GLOBAL, "RoCE v2"),
                (UNUSED, ""),
                (MAPPED, "IB/RoCE v1"),
                (MAPPED, "RoCE v2"),
            ],
            {},
            "10.77.0.1",
        ),
        ([(LINK_LOCAL, "RoCE v2"), (GLOBAL, "RoCE v2")], {}, "2001:db8::1"),
        ([(LINK_LOCAL, "RoCE v2"), (MAPPED, "IB/RoCE v1")], {}, None),
        ([(LINK_LOCAL, "IB/RoCE v1")], {"link_layer": "InfiniBand"}, "fe80::5054:ff:fe12:3456"),
    ],
    ids=["mapped RoCE v2 first", "else a routable one", "no way to peers", "InfiniBand's first"],
)
def test_the_gid_is_one_that_peers_can_route_to(
    tmp_path: Path, gids: Gids, options: dict[str, str], ip: str | None
) -> None:
    add_rdma(tmp_path, "mlx5_0", gids, **options)
    (port,) = discover(tmp_path)
    assert (port.gid and port.gid.ip) == ip
    assert (port.name, port.bandwidth_bytes_s, port.is_ethernet) == (
        "mlx5_0:1",
        12.5e9,
        not options,
    )
    if port.usable:
        assert f"GID {len(gids) - 1} {gids[-1][1]} {ip} on eth0" in str(port)
    else:
        with pytest.raises(ConfigError, match="no usable GID"):
            choose([port], ())


def test_all_active_ports_are_rails_unless_some_are_named(tmp_path: Path) -> None:
    for device, state in (("mlx5_1", "4: ACTIVE"), ("mlx5_0", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        add_rdma(tmp_path, device, [(MAPPED, "RoCE v2")], state)
    ports = discover(tmp_path)
    for wanted, names in (
        ((), ["mlx5_0:1", "mlx5_1:1"]),
        (("mlx5_1:1",), ["mlx5_1:1"]),
        (("mlx5_1",), ["mlx5_1:1"]),
    ):
        assert [port.name for port in choose(ports, wanted)] == names
    for of, wanted_name, words in (
        (ports, "mlx5_2:1", "cannot be used"),
        (ports, "mlx4_0:1", "not one of the device ports"),
        (discover(tmp_path / "absent"), None, "driver"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose(of, [wanted_name] if wanted_name else [])
    assert best_gid([], is_ethernet=False) is None


OWN = [
    InterfaceAddress(interface, ip_address(address))
    for interface, address in [
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("eth0", "10.0.0.1"),
        ("eth0", "fe80::1"),
        ("eth1", "fd00::2"),
    ]
]


@pytest.mark.parametrize(
    ("addresses", "own", "rails"),
    [
        (
            ["10.0.0.1", "fd00::2"],
            OWN,
            [Rail("tcp", "eth0", "10.0.0.1", 3e9), Rail("tcp", "eth1", "fd00::2")],
        ),
        (
            ["127.0.0.1", "127.0.0.2", "::1"],
            OWN,
            [
                Rail("tcp", "lo", "127.0.0.1"),
                Rail("tcp", "lo/127.0.0.2", "127.0.0.2"),
                Rail("tcp", "lo/::1", "::1"),
            ],
        ),
        (["10.0.0.1"], [], [Rail("tcp", "10.0.0.1", "10.0.0.1")]),  # the kernel does not tell
    ],
)
def test_a_rail_is_named_after_its_interface_and_knows_its_speed(
    tmp_path: Path, addresses: list[str], own: list[InterfaceAddress], rails: list[Rail]
) -> None:
    for interface, speed in (("eth0", "24000"), ("eth1", "-1"), ("lo", "nonsense")):
        write(tmp_path / "class/net" / interface, speed=speed)
    assert tcp_rails(addresses, own, tmp_path) == rails
    assert bandwidth_of("absent", tmp_path) is None


@pytest.mark.parametrize(
    ("addresses", "own", "complaint"),
    [
        (["10.0.0.2"], OWN, r"10\.0\.0\.2 is no address of this machine.*10\.0\.0\.1"),
        (["0.0.0.0"], OWN, "cannot be dialled"),
        (["::"], [], "cannot be dialled"),
        (["10.0.0.1"] * 3, OWN, "twice"),
    ],
)
def test_an_address_that_peers_cannot_reach_or_that_is_given_twice_is_refused(
    addresses: list[str], own: list[InterfaceAddress], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tcp_rails(addresses, own)


def test_other_machines_reach_neither_loopback_nor_link_local_addresses() -> None:
    assert reachable_addresses(OWN) == ["10.0.0.1", "fd00::2"]


def test_this_machine_can_be_read() -> None:
    assert owner_of("127.0.0.1", read_addresses()) == "lo"
    assert [rail.name for rail in local_tcp_rails(["127.0.0.1"])] == ["lo"]
    with pytest.raises(ConfigError, match=r"no\.\.host"):
        local_tcp_rails(["no..host"])
