"""Rails in virtual time: everything arrives, at close to the sum of the bandwidths, around outages."""

from __future__ import annotations

import random

import pytest

from tests.transfer.rails.simulation import SLICE_BYTES, Simulation
from transfer.address import Rail
from transfer.rails.health import HealthEvent, RailHealth
from transfer.rails.paths import Path, PathChooser
from transfer.rails.topology import Preference, Topology

GB = 1e9


def rails(count: int, transport: str = "tcp") -> list[Path]:
    return [
        Path(
            transport,
            Rail(transport, f"{transport}{n}", f"here-{n}"),
            Rail(transport, f"{transport}{n}", f"there-{transport}-{n}"),
            0,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_unknown_unequal_rails_together_give_nearly_the_sum(count: int, seed: int) -> None:
    draw = random.Random(seed)
    ways = rails(count)
    bandwidths = {way: draw.uniform(1, 4) * GB for way in ways}
    simulation = Simulation(
        PathChooser(ways, Topology(), RailHealth()),
        bandwidths,
        window=8 * count,
        jitter=0.2,
        seed=seed,
    )
    took = simulation.run(2000)
    assert sum(simulation.arrived.values()) == 2000
    assert 2000 * SLICE_BYTES / took >= 0.9 * sum(bandwidths.values())


def test_wrong_nominal_bandwidths_are_corrected() -> None:
    ways = [
        Path(
            "tcp", Rail("tcp", f"eth{n}", "", bandwidth_bytes_s=nominal), Rail("tcp", "", f"{n}"), 0
        )
        for n, nominal in enumerate([12.5 * GB, 1.25 * GB])
    ]
    bandwidths = dict(zip(ways, [1 * GB, 1.2 * GB], strict=True))
    simulation = Simulation(PathChooser(ways, Topology(), RailHealth()), bandwidths)
    took = simulation.run(2000)
    assert 2000 * SLICE_BYTES / took >= 0.9 * 2.2 * GB


def test_a_far_rail_adds_its_bandwidth_under_load() -> None:
    ways = rails(2)
    topology = Topology({"cpu:0": Preference(("tcp0",), ("tcp1",))})
    simulation = Simulation(PathChooser(ways, topology, RailHealth()), dict.fromkeys(ways, 2 * GB))
    took = simulation.run(2000)
    assert 2000 * SLICE_BYTES / took >= 0.9 * 4 * GB


@pytest.mark.parametrize("count", [2, 4])
def test_a_rail_that_goes_down_is_left_alone_while_it_rests_and_comes_back(count: int) -> None:
    ways, health = rails(count), RailHealth()
    down = ways[1]
    simulation = Simulation(
        PathChooser(ways, Topology(), health),
        dict.fromkeys(ways, 0.05 * GB),
        outages={down: (5.0, 50.0)},
        window=4 * count,
    )
    num_slices = 12_500 * count
    simulation.run(num_slices, gap_s=0.012 / count)  # 150 s at 0.87 of the sum
    assert sum(simulation.arrived.values()) == num_slices
    assert simulation.num_given_up == 0
    assert simulation.sent_while_resting[down] == 0
    # Down at 5, resting to 35, one failed trial, resting to 95, healed.
    assert health.events == {HealthEvent.RESTED: 2, HealthEvent.HEALED: 1}
    back_at = min(at for at in simulation.arrived_at[down] if at > 50.0)
    assert 95.0 <= back_at <= 97.0
    late = [at for at in simulation.arrived_at[down] if at > 100.0]
    assert len(late) >= 0.8 * 50 / 0.012


def test_traffic_moves_to_the_next_transport_during_an_outage_and_back() -> None:
    rdma, tcp = rails(1, "rdma"), rails(1, "tcp")
    simulation = Simulation(
        PathChooser([*rdma, *tcp], Topology(), RailHealth()),
        {rdma[0]: 4 * GB, tcp[0]: 2 * GB},
        outages={rdma[0]: (1.0, 20.0)},
    )
    simulation.run(8000, gap_s=0.01)  # 80 s
    assert sum(simulation.arrived.values()) == 8000
    assert simulation.num_given_up == 0
    over_tcp = simulation.arrived_at[tcp[0]]
    assert min(over_tcp) >= 1.0
    assert max(over_tcp) <= 33.0
    assert len(over_tcp) >= 2900


def test_when_every_rail_is_down_slices_end_and_later_ones_get_through() -> None:
    ways = rails(2)
    simulation = Simulation(
        PathChooser(ways, Topology(), RailHealth()),
        dict.fromkeys(ways, 1 * GB),
        outages=dict.fromkeys(ways, (0.0, 10.0)),
    )
    simulation.run(400, gap_s=0.05)  # 20 s
    assert simulation.num_given_up + sum(simulation.arrived.values()) == 400
    first_back = min(at for times in simulation.arrived_at.values() for at in times)
    assert 10.0 <= first_back <= 10.5  # nothing waits for a rest to end when there is nothing else
