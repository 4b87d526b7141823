"""What is read from sysfs, on machines built from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import ConfigError
from tests.transfer.rails.machines import FakeMachine, two_sockets
from transfer.address import Rail
from transfer.rails.sysfs import read_machine, read_topology
from transfer.rails.topology import Preference


def test_a_machine_of_two_sockets_gives_the_matrix_one_expects(tmp_path: Path) -> None:
    fake = two_sockets(tmp_path)
    rails = [Rail("rdma", "mlx5_0:1", ""), Rail("rdma", "mlx5_1:1", ""), Rail("tcp", "eth0", "")]
    assert read_topology(rails, sysfs=fake.root).matrix == {
        "cpu:0": Preference(("mlx5_0:1", "eth0"), ("mlx5_1:1",)),
        "cpu:1": Preference(("mlx5_1:1",), ("mlx5_0:1", "eth0")),
        "cuda:0": Preference(("mlx5_0:1",), ("eth0", "mlx5_1:1")),
        "cuda:1": Preference(("mlx5_1:1",), ("mlx5_0:1", "eth0")),
    }


def test_speeds_and_rates_are_bytes_per_second(tmp_path: Path) -> None:
    devices = read_machine(two_sockets(tmp_path).root).devices
    assert devices["eth0"].bandwidth_bytes_s == 25e9 / 8
    assert devices["mlx5_1:1"].bandwidth_bytes_s == 400e9 / 8
    assert devices["lo"].bandwidth_bytes_s is None


@pytest.mark.parametrize("speed", ["-1", "0", "", "unknown"])
def test_a_link_without_a_speed_has_none(tmp_path: Path, speed: str) -> None:
    fake = FakeMachine(tmp_path)
    fake.interface("eth0", fake.pci("pci0000:00", "0000:00:03.0"), speed=speed)
    assert read_machine(tmp_path).devices["eth0"].bandwidth_bytes_s is None


def test_a_virtio_nic_takes_the_numa_node_of_its_pci_slot(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    slot = fake.pci("pci0000:00", "0000:00:03.0", numa_node=1)
    fake.interface("eth0", f"{slot}/virtio2")
    device = read_machine(tmp_path).devices["eth0"]
    assert device.numa_node == 1
    assert device.pci_path == ("pci0000:00", "0000:00:03.0")


def test_minus_one_is_no_numa_node(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.interface("eth0", fake.pci("pci0000:00", "0000:00:03.0", numa_node=-1))
    assert read_machine(tmp_path).devices["eth0"].numa_node is None


def test_a_bond_sits_where_its_first_interface_sits(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.interface("eth0", fake.pci("pci0000:00", "0000:00:03.0", numa_node=1), speed="10000")
    fake.interface("eth1", fake.pci("pci0000:00", "0000:00:04.0", numa_node=1), speed="10000")
    fake.stacked("bond0", "eth0", "eth1", speed="20000")
    bond = read_machine(tmp_path).devices["bond0"]
    assert bond.numa_node == 1
    assert bond.bandwidth_bytes_s == 20e9 / 8


def test_soft_roce_sits_where_its_interface_sits(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.interface("eth0", fake.pci("pci0000:00", "0000:00:03.0", numa_node=0))
    fake.soft_roce("rxe0", "eth0")
    assert read_machine(tmp_path).devices["rxe0:1"].pci_path == ("pci0000:00", "0000:00:03.0")


def test_only_graphics_devices_of_the_vendor_are_gpus(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    for slot, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1234", "0x030000")]
    ):
        fake.pci("pci0000:00", f"0000:00:0{slot}.0", vendor=vendor, **{"class": kind})
    assert [gpu.name for gpu in read_machine(tmp_path).gpus] == ["0000:00:00.0"]


def test_distances_that_the_firmware_leaves_out_are_assumed(tmp_path: Path) -> None:
    fake = FakeMachine(tmp_path)
    fake.numa_node(0)
    fake.numa_node(2, "nonsense")
    assert read_machine(tmp_path).numa_distances == {0: {0: 10, 2: 20}, 2: {0: 20, 2: 10}}


def test_a_machine_without_sysfs_is_one_node(tmp_path: Path) -> None:
    found = read_topology([Rail("tcp", "eth0", "")], sysfs=tmp_path / "absent")
    assert found.matrix == {"cpu:0": Preference(("eth0",))}


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.numa_distances
    assert all(machine.devices)


def test_an_override_replaces_what_sysfs_says(tmp_path: Path) -> None:
    two_sockets(tmp_path / "sys")
    rails = [Rail("rdma", "mlx5_0:1", ""), Rail("tcp", "eth0", "")]
    override = tmp_path / "topology.json"
    override.write_text('{"cpu:0": {"preferred": ["eth0"]}}')
    matrix = read_topology(rails, override, tmp_path / "sys").matrix
    assert matrix["cpu:0"] == Preference(("eth0",), ("mlx5_0:1",))
    assert matrix["cpu:1"] == Preference(("mlx5_0:1", "eth0"))


def test_a_wrong_override_is_named_with_its_fault(tmp_path: Path) -> None:
    override = tmp_path / "topology.json"
    override.write_text('{"cpu:0": {"preferred": ["eth9"]}}')
    with pytest.raises(ConfigError, match=r"topology.json.*eth9.*did you mean eth0"):
        read_topology([Rail("tcp", "eth0", "")], override, tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_topology([], tmp_path / "absent.json", tmp_path)
    override.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        read_topology([], override, tmp_path)
