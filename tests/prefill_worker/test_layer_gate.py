"""The engine's thread waits for layers, never without a bound, and hears when nothing more will come."""

from __future__ import annotations

import threading

import pytest

from prefill_worker.layered_load import BoundedWait, LayerGate, PrefixLate
from tests.patience import PATIENCE_S


def test_the_bound_is_one_for_all_layers_and_what_is_there_is_not_waited_for() -> None:
    gate = LayerGate()
    wait = BoundedWait(gate, limit_s=0.001)
    with pytest.raises(PrefixLate):
        wait.before(0)
    assert (waited_s := wait.waited_s) > 0.0
    gate.arrived(1)
    wait.before(0)
    assert wait.waited_s == waited_s
    with pytest.raises(PrefixLate):
        wait.before(1)


def _wait_elsewhere(wait: BoundedWait, layer: int) -> tuple[threading.Thread, list[PrefixLate]]:
    errors: list[PrefixLate] = []

    def work() -> None:
        try:
            wait.before(layer)
        except PrefixLate as late:
            errors.append(late)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, errors


def test_who_waits_goes_on_when_the_layer_is_there() -> None:
    gate = LayerGate()
    thread, errors = _wait_elsewhere(BoundedWait(gate, PATIENCE_S), 1)
    gate.arrived(1)
    gate.arrived(2)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert not errors


def test_who_waits_is_told_that_nothing_more_comes() -> None:
    gate = LayerGate()
    gate.arrived(1)
    thread, errors = _wait_elsewhere(BoundedWait(gate, PATIENCE_S), 1)
    gate.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(errors) == 1
    BoundedWait(gate, 0.0).before(0)
