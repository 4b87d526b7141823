"""What processes of one cluster are told by default agrees, whoever starts them."""

from __future__ import annotations

from conductor.config import ConductorConfig
from conductor.policies import PUBLISHED_POLICY
from deploy.config import ServeConfig
from traces.simulator.command import SimulateConfig


def test_a_cluster_places_as_a_conductor_by_itself() -> None:
    assert ServeConfig().placement_policy == ConductorConfig().placement_policy == "moonserve"


def test_simulations_are_of_what_was_published_unless_told_otherwise() -> None:
    assert SimulateConfig(trace="t").policy == (PUBLISHED_POLICY,) == ("global-cache-aware",)
