"""Who is taken for lost without a word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.silence import LATE_AFTER_S, SILENT_AFTER_S, Sign, Suspicion, is_late
from protocol.ids import Role

SIGNS = st.lists(
    st.builds(
        Sign,
        instance_id=st.uuids().map(str),
        role=st.sampled_from([Role.PREFILL, Role.DECODE]),
        draining=st.booleans(),
        last_heard_s=st.floats(0, 10),
        last_word_s=st.floats(0, 10),
    ),
    max_size=6,
    unique_by=lambda sign: sign.instance_id,
)


def sign(name: str, heard_s: float, word_s: float = 9.0, *, draining: bool = False) -> Sign:
    return Sign(instance_id=name, role=Role.DECODE, draining=draining, last_heard_s=heard_s, last_word_s=word_s)


def silent(signs: list[Sign]) -> set[str]:
    """To whom has just begun to look."""
    return Suspicion().silent(signs, 100.0)


OTHER = sign("d1", 0.1)


@pytest.mark.parametrize(
    ("signs", "lost"),
    [
        ([sign("d0", SILENT_AFTER_S), OTHER], {"d0"}),
        ([sign("d0", 9.0, word_s=0.1), OTHER], set()),  # it still sends tokens
        # Where there is nobody else it is waited for.
        ([sign("d0", 9.0)], set()),
        ([sign("d0", 9.0), sign("d1", 9.0)], set()),
        ([sign("d0", 9.0), sign("d1", 0.1, draining=True)], set()),
    ],
)
def test_who_is_heard_by_nobody_is_lost_when_somebody_else_is_there(signs: list[Sign], lost: set[str]) -> None:
    assert silent(signs) == lost


@given(SIGNS)
def test_somebody_of_the_role_is_always_left_and_silence_is_preceded_by_lateness(signs: list[Sign]) -> None:
    lost = silent(signs)
    for each in signs:
        if each.instance_id in lost:
            left = [s for s in signs if s.role is each.role and s.instance_id not in lost]
            assert any(s.last_heard_s < LATE_AFTER_S and not s.draining for s in left)
    assert not lost or is_late(signs)


def test_where_workers_were_late_and_spoke_again_more_patience_is_had_for_a_while() -> None:
    suspicion = Suspicion()
    late = [sign("d0", 1.5 * SILENT_AFTER_S), sign("d1", 0.1)]
    assert suspicion.silent(late, 0.0) == {"d0"}
    assert suspicion.silent([sign("d0", 0.1), sign("d1", 0.1)], 1.0) == set()
    assert suspicion.silent(late, 5.0) == set()
    for_ever = [sign("d0", 100.0), sign("d1", 0.1)]
    assert suspicion.silent(for_ever, 10.0) == {"d0"}
    assert suspicion.silent([sign("d1", 0.1)], 11.0) == set()
    assert suspicion.silent(late, 300.0) == {"d0"}


def test_punctual_workers_change_nothing() -> None:
    suspicion = Suspicion()
    for tenths in range(100):
        beats = [sign("d0", tenths % 10 / 10), sign("d1", (tenths + 3) % 10 / 10)]
        assert suspicion.silent(beats, tenths / 10) == set()
    assert suspicion.silent([sign("d0", SILENT_AFTER_S), OTHER], 12.0) == {"d0"}
