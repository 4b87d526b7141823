"""Text from tokens: whole characters, stop strings across token borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.detokenize import (
    REPLACEMENT,
    ByteDecoder,
    StopMatcher,
    TextOutput,
    WindowDecoder,
)
from gateway.text.tokenizer import load_tokenizer
from tests.gateway.conftest import MODEL

TOKENIZER = load_tokenizer(MODEL)
TEXTS = st.text(max_size=40)
ANY_TOKENS = st.lists(st.integers(0, TOKENIZER.size - 1), max_size=40)


def window_decoder() -> WindowDecoder:
    return WindowDecoder(lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True))


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The slow way: the first end of any stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@given(ANY_TOKENS, st.booleans())
def test_byte_level_deltas_join_to_the_full_decode_of_any_tokens(
    ids: list[int], skip: bool
) -> None:
    decoder = TOKENIZER.decoder(skip_special_tokens=skip)
    assert isinstance(decoder, ByteDecoder)
    text = "".join(map(decoder.push, ids)) + decoder.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(TEXTS)
def test_window_deltas_join_to_the_full_decode_of_any_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    decoder = window_decoder()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


@given(TEXTS)
def test_no_delta_holds_a_part_of_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for decoder in (TOKENIZER.decoder(), window_decoder()):
        for delta in map(decoder.push, ids):
            assert REPLACEMENT not in delta or REPLACEMENT in text


def test_a_window_of_broken_bytes_stays_short() -> None:
    """A model that writes only broken characters must not make decoding quadratic."""
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return TOKENIZER.decode(ids)

    decoder = WindowDecoder(decode)
    broken = next(t for t in range(TOKENIZER.size) if TOKENIZER.token_bytes(t) == b"\xe6")
    text = "".join(decoder.push(broken) for _ in range(500))
    assert max(lengths) <= 32
    assert len(text) >= 400


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_wherever_token_borders_fall(deltas: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for delta in deltas:
        emitted += matcher.push(delta)
    emitted += matcher.finish()
    assert (emitted, matcher.stopped) == reference("".join(deltas), stops)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_nothing_that_may_begin_a_stop_string_is_emitted(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for char in text:
        emitted += matcher.push(char)
        whole, _ = reference(text, stops)
        assert whole.startswith(emitted)


@given(ANY_TOKENS, st.lists(st.sampled_from(["e", "the", " a", "\n", "ab"]), max_size=3))
def test_output_is_the_full_decode_cut_at_the_first_stop(ids: list[int], stops: list[str]) -> None:
    output = TextOutput(TOKENIZER.decoder(), stops)
    emitted = ""
    for token_id in ids:
        emitted += output.push(token_id)
        if output.stopped:
            break
    emitted += output.finish()
    expected, stopped = reference(TOKENIZER.decode(ids, skip_special_tokens=True), stops)
    assert (emitted, output.stopped) == (expected, stopped)


@given(ANY_TOKENS, st.sampled_from(["e", "the", " a", "\n", "ab"]))
def test_a_stop_that_belongs_to_the_text_ends_it(ids: list[int], stop: str) -> None:
    """All up to the stop string's last character, and nothing behind it."""
    output = TextOutput(TOKENIZER.decoder(), [stop], includes_stop=True)
    emitted = ""
    for token_id in ids:
        emitted += output.push(token_id)
        if output.stopped:
            break
    emitted += output.finish()
    before, stopped = reference(TOKENIZER.decode(ids, skip_special_tokens=True), [stop])
    assert emitted == (before + stop if stopped else before)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    ids = TOKENIZER.encode(" to be or not to be", add_special_tokens=False)
    output = TextOutput(TOKENIZER.decoder(), [" be"], min_tokens=len(ids) - 1)
    text = "".join(map(output.push, ids)) + output.finish()
    assert text == " to be or not to"


@pytest.mark.parametrize("token_id", [TOKENIZER.size, TOKENIZER.size + 1000])
def test_tokens_beyond_the_tokenizer_have_no_text(token_id: int) -> None:
    assert TOKENIZER.decoder().push(token_id) == ""
