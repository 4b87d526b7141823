"""The guest itself: two rails, of which each carries data, breaks when its link goes down, and heals."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

RAILS = {"rxe0": "10.77.0.1", "rxe1": "10.77.1.1"}


def port_file(device: str, name: str) -> str:
    return Path(f"/sys/class/infiniband/{device}/ports/1/{name}").read_text().strip()


def link(interface: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", interface, state], check=True)


@pytest.fixture(autouse=True)
def _rails_are_up_afterwards() -> Iterator[None]:
    yield
    for interface in ("eth0", "eth1"):
        link(interface, "up")


def carries(program: str, initiator: str, target: str) -> bool:
    """Whether a perftest program moves 32 messages of 64 KiB between two processes."""
    command = [program, "-x", "1", "-F", "-s", "65536", "-n", "32", "--tx-depth=16", "-d"]
    with subprocess.Popen([*command, target], stdout=subprocess.DEVNULL) as server:
        try:
            return _client([*command, initiator, "127.0.0.1"], server)
        finally:
            server.kill()


def _client(command: list[str], server: subprocess.Popen[bytes]) -> bool:
    """A client that comes before its server listens is refused, and asks again."""
    while server.poll() is None:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if ended.returncode == 0:
            return True
        if "Couldn't connect" not in ended.stdout + ended.stderr:
            return False
    return False


@pytest.mark.parametrize(("device", "address"), RAILS.items())
def test_a_rail_has_a_routable_gid_and_large_packets(device: str, address: str) -> None:
    gids = {
        port_file(device, f"gid_attrs/types/{i}"): port_file(device, f"gids/{i}") for i in (0, 1)
    }
    octets = [f"{int(octet):02x}" for octet in address.split(".")]
    assert gids["RoCE v2"].endswith(f"ffff:{octets[0]}{octets[1]}:{octets[2]}{octets[3]}")
    assert "ACTIVE" in port_file(device, "state")
    shown = subprocess.run(
        ["ibv_devinfo", "-d", device], capture_output=True, text=True, check=True
    )
    assert "active_mtu:\t\t4096" in shown.stdout


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw"])
@pytest.mark.parametrize(
    ("initiator", "target"), [("rxe0", "rxe0"), ("rxe1", "rxe1"), ("rxe0", "rxe1")]
)
def test_two_processes_move_data(program: str, initiator: str, target: str) -> None:
    assert carries(program, initiator, target)


def test_a_rail_that_is_down_carries_nothing_until_it_is_up_again() -> None:
    assert carries("ib_write_bw", "rxe1", "rxe1")
    link("eth1", "down")
    assert "DOWN" in port_file("rxe1", "state")
    assert not carries("ib_write_bw", "rxe1", "rxe1")
    assert not carries("ib_write_bw", "rxe0", "rxe1")
    assert carries("ib_write_bw", "rxe0", "rxe0")
    link("eth1", "up")
    while "ACTIVE" not in port_file("rxe1", "state"):
        pass
    assert carries("ib_write_bw", "rxe1", "rxe1")
    assert carries("ib_write_bw", "rxe0", "rxe1")
