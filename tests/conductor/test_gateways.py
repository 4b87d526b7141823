"""Which gateways there are, and names of requests."""

from __future__ import annotations

from conductor.gateways import LIFETIME_S, GatewayView, SeenGateways


def view(name: str, num_requests: int = 0) -> GatewayView:
    return GatewayView(instance_id=name, rpc_address="a:1", host="h", num_requests=num_requests)


def test_gateways_are_there_while_they_ask() -> None:
    gateways = SeenGateways()
    gateways.saw(view("b", 1), 0.0)
    gateways.saw(view("a"), 1.0)
    gateways.saw(view("b", 7), 2.0)
    assert gateways.present(2.0) == [view("a"), view("b", 7)]
    assert gateways.present(1.0 + LIFETIME_S) == [view("b", 7)]
    assert gateways.present(2.0 + LIFETIME_S) == []
