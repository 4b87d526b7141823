"""Reads sysfs and kernel files of machines built from files, and decides which devices are near which memory."""

import os
from ipaddress import ip_address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.errors import ConfigError
from moonserve.transfer.paths import hardware_discovery
from moonserve.transfer.paths.peer_address import Rail
from moonserve.transfer.paths.topology import Device, Machine, Preference, Topology, decide_topology
from moonserve.transfer.rdma.device import best_gid, choose_ports, discover_ports

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0001"
UNUSED = "0000:0000:0000:0000:0000:0000:0000:0000"
SLOT = ("pci0000:00", "0000:00:03.0")
Gids = list[tuple[str, str]]


class FakeMachine:
    """Machine built from files below `root`, which stands for /sys. It has symbolic links where the kernel has them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def numa_node(self, node: int, distances: str = "") -> None:
        self._write(f"devices/system/node/node{node}", distance=distances)

    def pci(self, *slots: str, **files: object) -> str:
        """Adds a PCI device below the bridges named before it. Returns its path."""
        place = "/".join(["devices", *slots])
        self._write(place, **files)
        self._link(f"bus/pci/devices/{slots[-1]}", place)
        return place

    def interface(self, name: str, place: str | None, *lower: str, **files: object) -> None:
        """Adds a network interface. `place`: path of its hardware; None: virtual, perhaps on top of `lower`."""
        entry = f"{place or 'devices/virtual'}/net/{name}"
        self._write(entry, **files)
        if place is not None:
            self._link(f"{entry}/device", place)
        for below in lower:
            self._link(f"{entry}/lower_{below}", f"class/net/{below}")
        self._link(f"class/net/{name}", entry)

    def rdma(
        self,
        name: str,
        place: str | None = None,
        gids: Gids | None = None,
        *,
        state: str = "4: ACTIVE",
        link_layer: str = "Ethernet",
        **files: object,
    ) -> None:
        """Adds an RDMA device. `place` None: Soft-RoCE, whose file `parent` names its interface."""
        entry = f"{place or 'devices/virtual'}/infiniband/{name}"
        port = f"{entry}/ports/1"
        self._write(entry, **files)
        self._write(port, state=state, link_layer=link_layer, rate="100 Gb/sec (4X EDR)")
        for index, (gid, kind) in enumerate(gids or []):
            self._write(f"{port}/gids", **{str(index): gid})
            if gid != UNUSED:
                self._write(f"{port}/gid_attrs/types", **{str(index): kind})
                self._write(f"{port}/gid_attrs/ndevs", **{str(index): "eth0"})
        if place is not None:
            self._link(f"{entry}/device", place)
        self._link(f"class/infiniband/{name}", entry)

    def _write(self, folder: str, **files: object) -> None:
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.root / folder / name).write_text(f"{content}\n")

    def _link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))


@pytest.fixture
def fake(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "sys")


@pytest.fixture
def two_sockets(fake: FakeMachine) -> Path:
    """Two NUMA nodes, each with a PCI switch that has a GPU and an RDMA NIC; Ethernet is on node 0."""
    for node, distances in enumerate(("10 21", "21 10")):
        fake.numa_node(node, distances)
        bridges, gpu = (f"pci000{node}:00", f"000{node}:00:01.0"), {"class": "0x030200"}
        fake.pci(*bridges, f"000{node}:02:00.0", numa_node=node, vendor="0x10de", **gpu)
        fake.rdma(f"mlx5_{node}", fake.pci(*bridges, f"000{node}:03:00.0", numa_node=node))
    fake.interface("eth0", fake.pci("pci0000:00", "0000:00:07.0", numa_node=0), speed="25000")
    fake.interface("lo", None)
    return fake.root


def test_a_two_socket_machine_has_the_expected_topology(two_sockets: Path) -> None:
    rails = [Rail("rdma", "mlx5_0:1", ""), Rail("rdma", "mlx5_1:1", ""), Rail("tcp", "eth0", "")]
    matrix = {
        "cpu:0": Preference(("mlx5_0:1", "eth0"), ("mlx5_1:1",)),
        "cpu:1": Preference(("mlx5_1:1",), ("mlx5_0:1", "eth0")),
        "cuda:0": Preference(("mlx5_0:1",), ("eth0", "mlx5_1:1")),
        "cuda:1": Preference(("mlx5_1:1",), ("mlx5_0:1", "eth0")),
    }
    assert hardware_discovery.read_topology(rails, sysfs=two_sockets).matrix == matrix
    devices = hardware_discovery.read_machine(two_sockets).devices
    assert devices["eth0"].bandwidth_bytes_s == 25e9 / 8
    assert (devices["mlx5_1:1"].bandwidth_bytes_s, devices["mlx5_1:1"].numa_node) == (100e9 / 8, 1)
    assert devices["lo"].bandwidth_bytes_s is None


@pytest.mark.parametrize(
    ("address", "location"),
    [(0x7F0000001000, "cpu:1"), (0x7F0000000000, "cpu:1"), (0x5000, "cpu:0"), (0x8F0000000000, "")],
)
def test_the_location_is_node_with_most_pages(two_sockets: Path, tmp_path: Path, address: int, location: str) -> None:
    (tmp_path / "numa_maps").write_text(
        "5000 default heap anon=4 N0=4 kernelpagesize_kB=4\n"
        "7f0000000000 default file=/memfd:moonserve N0=10 N1=200 kernelpagesize_kB=4\n"
        "8f0000000000 default file=/memfd:moonserve\n"
    )
    assert hardware_discovery.location_of(address, tmp_path, two_sockets) == location
    assert hardware_discovery.location_of(address, tmp_path / "absent", two_sockets) == ""
    # Without sysfs there is a single node.
    assert hardware_discovery.location_of(address, tmp_path, tmp_path) == "cpu:0"


@pytest.mark.parametrize("speed", ["-1", "0", "", "unknown"])
def test_malformed_sysfs_files_mean_unknown(fake: FakeMachine, speed: str) -> None:
    fake.interface("eth0", fake.pci(*SLOT, numa_node=-1), speed=speed)
    fake.numa_node(0)
    fake.numa_node(2, "nonsense")
    machine = hardware_discovery.read_machine(fake.root)
    assert machine.devices["eth0"].bandwidth_bytes_s is None
    assert machine.devices["eth0"].numa_node is None
    assert machine.numa_distances == {0: {0: 10, 2: 20}, 2: {0: 20, 2: 10}}


def test_virtual_devices_have_the_location_of_their_hardware(fake: FakeMachine) -> None:
    slot = fake.pci(*SLOT, numa_node=1)
    fake.interface("eth0", f"{slot}/virtio2")
    fake.interface("bond0", None, "eth0", speed="20000")
    fake.rdma("rxe0", parent="eth0")
    devices = hardware_discovery.read_machine(fake.root).devices
    assert {(device.numa_node, device.pci_path) for device in devices.values()} == {(1, SLOT)}
    assert devices["bond0"].bandwidth_bytes_s == 20e9 / 8


def test_only_graphics_devices_of_the_vendor_are_gpus(fake: FakeMachine) -> None:
    for slot, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1234", "0x030000")]):
        fake.pci("pci0000:00", f"0000:00:0{slot}.0", vendor=vendor, **{"class": kind})
    assert [gpu.name for gpu in hardware_discovery.read_machine(fake.root).gpus] == ["0000:00:00.0"]


def test_a_machine_without_sysfs_is_one_node_without_devices(tmp_path: Path) -> None:
    found = hardware_discovery.read_topology([Rail("tcp", "eth0", "")], sysfs=tmp_path / "absent")
    assert found.matrix == {"cpu:0": Preference(("eth0",))}
    assert discover_ports(tmp_path / "absent") == []
    with pytest.raises(ConfigError, match="driver"):
        choose_ports([], ())


def test_this_machine_can_be_read() -> None:
    machine = hardware_discovery.read_machine()
    assert machine.numa_distances
    assert all(machine.devices)
    assert hardware_discovery.owner_of("127.0.0.1", hardware_discovery.read_addresses()) == "lo"
    assert [rail.name for rail in hardware_discovery.local_tcp_rails(["127.0.0.1"])] == ["lo"]
    with pytest.raises(ConfigError, match=r"no\.\.host"):
        hardware_discovery.local_tcp_rails(["no..host"])


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
def test_the_chosen_gid_is_routable(fake: FakeMachine, gids: Gids, options: dict[str, str], ip: str | None) -> None:
    fake.rdma("mlx5_0", fake.pci(*SLOT, numa_node=1), gids, **options)
    (port,) = discover_ports(fake.root)
    assert (port.gid and port.gid.ip) == ip
    assert (port.name, port.numa_node, port.bandwidth_bytes_s) == ("mlx5_0:1", 1, 12.5e9)
    assert port.is_ethernet == (not options)
    if port.usable:
        assert f"GID {len(gids) - 1} {gids[-1][1]} {ip} on eth0" in str(port)
    else:
        with pytest.raises(ConfigError, match="no usable GID"):
            choose_ports([port], ())


def test_all_active_ports_are_rails_unless_rails_are_named(fake: FakeMachine) -> None:
    for device, state in (("mlx5_1", "4: ACTIVE"), ("mlx5_0", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        fake.rdma(device, gids=[(MAPPED, "RoCE v2")], state=state)
    ports = discover_ports(fake.root)
    for wanted, names in (((), ["mlx5_0:1", "mlx5_1:1"]), (("mlx5_1:1",), ["mlx5_1:1"]), (("mlx5_1",), ["mlx5_1:1"])):
        assert [port.name for port in choose_ports(ports, wanted)] == names
    with pytest.raises(ConfigError, match="cannot be used"):
        choose_ports(ports, ["mlx5_2:1"])
    with pytest.raises(ConfigError, match="not one of the device ports"):
        choose_ports(ports, ["mlx4_0:1"])
    assert best_gid([], is_ethernet=False) is None


# TCP rails

OWN = [
    hardware_discovery.InterfaceAddress(interface, ip_address(address))
    for interface, address in [
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("eth0", "10.0.0.1"),
        ("eth0", "fe80::1"),
        ("eth1", "fd00::2"),
    ]
]
MACHINE = Machine(devices={"eth0": Device("eth0", 1, (), 3e9)})


@pytest.mark.parametrize(
    ("addresses", "own", "rails"),
    [
        (["10.0.0.1", "fd00::2"], OWN, [Rail("tcp", "eth0", "10.0.0.1", 1, 3e9), Rail("tcp", "eth1", "fd00::2")]),
        (
            ["127.0.0.1", "127.0.0.2", "::1"],
            OWN,
            [Rail("tcp", "lo", "127.0.0.1"), Rail("tcp", "lo/127.0.0.2", "127.0.0.2"), Rail("tcp", "lo/::1", "::1")],
        ),
        (["10.0.0.1"], [], [Rail("tcp", "10.0.0.1", "10.0.0.1")]),  # the kernel lists no addresses
    ],
)
def test_a_rail_has_the_name_node_and_speed_of_its_interface(
    addresses: list[str], own: list[hardware_discovery.InterfaceAddress], rails: list[Rail]
) -> None:
    assert hardware_discovery.tcp_rails(addresses, own, MACHINE) == rails


@pytest.mark.parametrize(
    ("addresses", "own", "complaint"),
    [
        (["10.0.0.2"], OWN, r"10\.0\.0\.2 is not an address of this machine.*10\.0\.0\.1"),
        (["0.0.0.0"], OWN, "cannot be dialled"),
        (["::"], [], "cannot be dialled"),
        (["10.0.0.1"] * 3, OWN, "twice"),
    ],
)
def test_an_address_that_peers_cannot_reach_or_that_is_given_twice_is_refused(
    addresses: list[str], own: list[hardware_discovery.InterfaceAddress], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        hardware_discovery.tcp_rails(addresses, own, MACHINE)


def test_loopback_and_link_local_addresses_are_not_reachable() -> None:
    assert hardware_discovery.reachable_addresses(OWN) == ["10.0.0.1", "fd00::2"]


# Topology matrix

TWO_NODES = {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}


def rails(*names: str) -> list[Rail]:
    return [Rail("rdma" if ":" in name else "tcp", name, "") for name in names]


def machine(*devices: Device, gpus: tuple[Device, ...] = ()) -> Machine:
    return Machine(TWO_NODES, {device.name: device for device in devices}, gpus)


def test_without_a_rail_on_its_node_memory_prefers_the_nearest() -> None:
    distances = {a: {b: 10 + 10 * abs(a - b) for b in range(3)} for a in range(3)}
    devices = {"eth0": Device("eth0", 0), "eth1": Device("eth1", 1)}
    found = decide_topology(Machine(distances, devices), rails("eth0", "eth1"))
    assert found.matrix["cpu:2"] == Preference(("eth1",), ("eth0",))


def test_an_unknown_rail_is_not_avoided() -> None:
    found = decide_topology(machine(Device("eth0", 0), Device("lo")), rails("eth0", "lo", "shm"))
    assert found.matrix["cpu:0"] == Preference(("eth0", "lo", "shm"))
    assert found.matrix["cpu:1"] == Preference(("eth0", "lo", "shm"))


def test_several_addresses_of_one_interface_share_its_node() -> None:
    found = decide_topology(machine(Device("eth0", 0), Device("eth1", 1)), rails("eth1", "eth1/10.0.0.9"))
    assert found.matrix["cpu:0"].preferred == ("eth1", "eth1/10.0.0.9")


def test_rails_missing_in_the_topology_are_preferred() -> None:
    topology = Topology({"cpu:0": Preference(("eth0",), ("eth1",))})
    near, far, other = rails("eth0", "eth1", "eth2")
    assert topology.prefers("cpu:0", near)
    assert not topology.prefers("cpu:0", far)
    assert topology.prefers("cpu:0", other)
    assert topology.prefers("cpu:9", far)
    assert Topology().prefers("cpu:0", far)


numa_nodes = st.sampled_from([None, 0, 1])
pci_paths = st.lists(st.sampled_from(["a", "b"]), max_size=3).map(lambda parts: ("pci0000:00", *parts) if parts else ())
places = st.tuples(numa_nodes, pci_paths)


@given(nics=st.lists(places, min_size=1, max_size=5), gpus=st.lists(places, max_size=3))
def test_every_location_names_every_rail_once_and_prefers_one(
    nics: list[tuple[int | None, tuple[str, ...]]], gpus: list[tuple[int | None, tuple[str, ...]]]
) -> None:
    devices = [Device(f"eth{i}", *place) for i, place in enumerate(nics)]
    names = [device.name for device in devices]
    whole = machine(*devices, gpus=tuple(Device(f"gpu{i}", *place) for i, place in enumerate(gpus)))
    found = decide_topology(whole, rails(*names))
    assert list(found.matrix) == ["cpu:0", "cpu:1", *(f"cuda:{i}" for i in range(len(gpus)))]
    for preference in found.matrix.values():
        assert preference.preferred
        assert sorted(preference.preferred + preference.secondary) == names
