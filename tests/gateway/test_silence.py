"""Who is taken for lost without a word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.silence import LATE_AFTER_S, SILENT_AFTER_S, Sign, is_late, silent
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
    return Sign(
        instance_id=name,
        role=Role.DECODE,
        draining=draining,
        last_heard_s=heard_s,
        last_word_s=word_s,
    )


def test_who_is_heard_by_nobody_is_lost_when_somebody_else_is_there() -> None:
    assert silent([sign("d0", SILENT_AFTER_S), sign("d1", 0.1)]) == {"d0"}


def test_one_that_still_sends_tokens_is_not_lost() -> None:
    """Its way to the conductor is broken, or the conductor is behind."""
    assert silent([sign("d0", 9.0, word_s=0.1), sign("d1", 0.1)]) == set()


def test_where_there_is_nobody_else_it_is_waited_for() -> None:
    alone = [sign("d0", 9.0)]
    assert silent(alone) == set()
    assert silent([*alone, sign("d1", 9.0)]) == set()
    assert silent([*alone, sign("d1", 0.1, draining=True)]) == set()


@given(SIGNS)
def test_somebody_of_the_role_is_always_left_and_silence_is_preceded_by_lateness(
    signs: list[Sign],
) -> None:
    lost = silent(signs)
    for each in signs:
        if each.instance_id in lost:
            left = [s for s in signs if s.role is each.role and s.instance_id not in lost]
            assert any(s.last_heard_s < LATE_AFTER_S and not s.draining for s in left)
    assert not lost or is_late(signs)
