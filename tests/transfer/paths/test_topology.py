"""The topology matrix: what is near what, and what an operator may say instead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transfer.address import Rail
from transfer.paths.topology import Device, Machine, Preference, Topology, decide

TWO_NODES = {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}


def rails(*names: str) -> list[Rail]:
    return [Rail("rdma" if ":" in name else "tcp", name, "") for name in names]


def machine(*devices: Device, gpus: tuple[Device, ...] = ()) -> Machine:
    return Machine(TWO_NODES, {device.name: device for device in devices}, gpus)


def test_without_a_rail_on_its_node_memory_prefers_the_nearest() -> None:
    distances = {a: {b: 10 + 10 * abs(a - b) for b in range(3)} for a in range(3)}
    devices = {"eth0": Device("eth0", 0), "eth1": Device("eth1", 1)}
    found = decide(Machine(distances, devices), rails("eth0", "eth1"))
    assert found.matrix["cpu:2"] == Preference(("eth1",), ("eth0",))


def test_a_rail_of_which_nothing_is_known_is_never_avoided() -> None:
    found = decide(machine(Device("eth0", 0), Device("lo")), rails("eth0", "lo", "shm"))
    assert found.matrix["cpu:0"] == Preference(("eth0", "lo", "shm"))
    assert found.matrix["cpu:1"] == Preference(("eth0", "lo", "shm"))


def test_several_addresses_of_one_interface_share_its_place() -> None:
    found = decide(machine(Device("eth0", 0), Device("eth1", 1)), rails("eth1", "eth1/10.0.0.9"))
    assert found.matrix["cpu:0"].preferred == ("eth1", "eth1/10.0.0.9")


def test_what_the_topology_does_not_mention_is_preferred() -> None:
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
    found = decide(whole, rails(*names))
    assert list(found.matrix) == ["cpu:0", "cpu:1", *(f"cuda:{i}" for i in range(len(gpus)))]
    for preference in found.matrix.values():
        assert preference.preferred
        assert sorted(preference.preferred + preference.secondary) == names
