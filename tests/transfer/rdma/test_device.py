"""Which ports and GIDs are found and chosen, from sysfs trees as kernels write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from transfer.rdma.device import best_gid, choose, discover

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0001"
UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"


def make_port(
    sysfs: Path,
    device: str,
    gids: list[tuple[str, str]],
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    numa_node: str | None = None,
) -> None:
    port = sysfs / "class/infiniband" / device / "ports/1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link_layer}\n")
    (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    for index, (gid, kind) in enumerate(gids):
        (port / f"gids/{index}").write_text(f"{gid}\n")
        if gid != UNUSED:
            (port / f"gid_attrs/types/{index}").write_text(f"{kind}\n")
            (port / f"gid_attrs/ndevs/{index}").write_text("eth0\n")
    if numa_node is not None:
        (sysfs / "class/infiniband" / device / "device").mkdir()
        (sysfs / "class/infiniband" / device / "device/numa_node").write_text(f"{numa_node}\n")


def test_a_mapped_roce_v2_gid_is_preferred(tmp_path: Path) -> None:
    gids = [
        (LINK_LOCAL, "IB/RoCE v1"),
        (LINK_LOCAL, "RoCE v2"),
        (GLOBAL, "RoCE v2"),
        (UNUSED, ""),
        (MAPPED, "IB/RoCE v1"),
        (MAPPED, "RoCE v2"),
    ]
    make_port(tmp_path, "mlx5_0", gids, numa_node="1")
    (port,) = discover(tmp_path)
    assert port.gid is not None
    assert (port.gid.index, port.gid.ip, port.gid.netdev) == (5, "10.77.0.1", "eth0")
    assert (port.name, port.numa_node, port.bandwidth_bytes_s) == ("mlx5_0:1", 1, 12.5e9)
    assert "GID 5 RoCE v2 10.77.0.1 on eth0" in str(port)


def test_without_ipv4_a_routable_gid_does(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", [(LINK_LOCAL, "RoCE v2"), (GLOBAL, "RoCE v2")])
    (port,) = discover(tmp_path)
    assert port.gid is not None
    assert port.gid.ip == "2001:db8::1"


def test_only_link_local_or_v1_addresses_are_no_way_to_peers(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", [(LINK_LOCAL, "RoCE v2"), (MAPPED, "IB/RoCE v1")])
    (port,) = discover(tmp_path)
    assert not port.usable
    with pytest.raises(ConfigError, match="no usable GID"):
        choose([port], ())


def test_infiniband_takes_its_first_gid(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", [(LINK_LOCAL, "IB/RoCE v1")], link_layer="InfiniBand")
    (port,) = discover(tmp_path)
    assert port.usable
    assert not port.is_ethernet


def test_all_active_ports_are_rails_unless_some_are_named(tmp_path: Path) -> None:
    for device in ("mlx5_1", "mlx5_0"):
        make_port(tmp_path, device, [(MAPPED, "RoCE v2")])
    make_port(tmp_path, "mlx5_2", [(MAPPED, "RoCE v2")], state="1: DOWN")
    ports = discover(tmp_path)
    assert [port.name for port in choose(ports, ())] == ["mlx5_0:1", "mlx5_1:1"]
    assert [port.name for port in choose(ports, ["mlx5_1:1"])] == ["mlx5_1:1"]
    assert [port.name for port in choose(ports, ["mlx5_1"])] == ["mlx5_1:1"]
    with pytest.raises(ConfigError, match="cannot be used"):
        choose(ports, ["mlx5_2:1"])
    with pytest.raises(ConfigError, match="not one of the device ports"):
        choose(ports, ["mlx4_0:1"])


def test_a_machine_without_devices_is_told_so(tmp_path: Path) -> None:
    assert discover(tmp_path) == []
    with pytest.raises(ConfigError, match="driver"):
        choose([], ())


def test_an_empty_table_has_no_best_gid() -> None:
    assert best_gid([], is_ethernet=True) is None
    assert best_gid([], is_ethernet=False) is None
