"""One JSON value in text that comes in pieces."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tools.json_value import JsonValue
from tests.thoroughness import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
NOISE = st.text(alphabet='{}[]":,\\u0a1-+.eEtrufalsn \n\x01é<', max_size=24)


def read(pieces: list[str]) -> tuple[str, bool, bool]:
    """What was read, whether that is complete, whether it broke."""
    value, taken = JsonValue(), ""
    for piece in pieces:
        end = value.read(piece, 0)
        taken += piece[:end]
        if end < len(piece):
            break
    return taken, value.is_complete, value.is_broken


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=float.__new__)
    except (ValueError, TypeError):
        return False
    return True


@given(VALUES, st.booleans(), st.booleans())
@settings(max_examples=examples(100))
def test_a_value_is_complete_at_its_end_and_not_before(
    value: object, is_ascii: bool, is_wide: bool
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=2 if is_wide else None)
    taken, is_complete, is_broken = read([text + "|more"])
    assert (taken, is_complete, is_broken) == (text, True, False)
    if text[0] in '{["':
        assert read([text[:-1]])[1:] == (False, False)


@given(NOISE)
@settings(max_examples=examples(400))
def test_what_is_complete_is_json_and_what_broke_cannot_become_any(text: str) -> None:
    taken, is_complete, is_broken = read([text + "|"])
    if is_complete:
        assert is_json(taken)
    if is_broken:
        assert not any(is_json((text + "|")[:end]) for end in range(len(taken) + 1, len(text) + 2))


@given(st.data())
@settings(max_examples=examples(150))
def test_pieces_do_not_matter(data: st.DataObject) -> None:
    text = data.draw(NOISE | VALUES.map(json.dumps)) + "|"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])


def test_a_number_or_nesting_without_end_breaks() -> None:
    assert read(["1" * 300, "1" * 300]) == ("1" * 400, False, True)
    assert read(["[" * 300]) == ("[" * 200, False, True)
