"""TCP rails come from the addresses of this machine, and only from those."""

from __future__ import annotations

from ipaddress import ip_interface

import pytest

from protocol.errors import ConfigError
from transfer.address import Rail
from transfer.rails.interfaces import (
    InterfaceAddress,
    local_tcp_rails,
    owner_of,
    reachable_addresses,
    read_addresses,
    tcp_rails,
)
from transfer.rails.topology import Device, Machine

OWN = [
    InterfaceAddress(interface, ip_interface(address))
    for interface, address in [
        ("lo", "127.0.0.1/8"),
        ("lo", "::1/128"),
        ("eth0", "10.0.0.1/24"),
        ("eth0", "fe80::1/64"),
        ("eth1", "fd00::2/64"),
    ]
]
MACHINE = Machine(devices={"eth0": Device("eth0", 1, (), 3e9)})


def test_a_rail_is_named_after_its_interface_and_knows_its_place_and_speed() -> None:
    assert tcp_rails(["10.0.0.1", "fd00::2"], OWN, MACHINE) == [
        Rail("tcp", "eth0", "10.0.0.1", 1, 3e9),
        Rail("tcp", "eth1", "fd00::2"),
    ]


def test_further_addresses_of_an_interface_have_names_of_their_own() -> None:
    names = [rail.name for rail in tcp_rails(["127.0.0.1", "127.0.0.2", "::1"], OWN, MACHINE)]
    assert names == ["lo", "lo/127.0.0.2", "lo/::1"]


def test_an_address_that_peers_cannot_reach_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"10\.0\.0\.2 is no address of this machine.*10\.0\.0\.1"
    ):
        tcp_rails(["10.0.0.2"], OWN, MACHINE)


@pytest.mark.parametrize("own", [OWN, []])
@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_a_wildcard_is_refused_with_or_without_the_kernels_help(
    address: str, own: list[InterfaceAddress]
) -> None:
    with pytest.raises(ConfigError, match="cannot be dialled"):
        tcp_rails([address], own, MACHINE)


def test_an_address_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        tcp_rails(["10.0.0.1", "10.0.0.1", "10.0.0.1"], OWN, MACHINE)


def test_where_the_kernel_does_not_tell_the_address_is_the_name() -> None:
    assert tcp_rails(["10.0.0.1"], [], MACHINE) == [Rail("tcp", "10.0.0.1", "10.0.0.1")]


def test_other_machines_reach_neither_loopback_nor_link_local_addresses() -> None:
    assert reachable_addresses(OWN) == ["10.0.0.1", "fd00::2"]


def test_this_machine_owns_its_loopback() -> None:
    assert owner_of("127.0.0.1", read_addresses()) == "lo"
    assert [rail.name for rail in local_tcp_rails(["127.0.0.1"])] == ["lo"]


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no\.\.host"):
        local_tcp_rails(["no..host"])
