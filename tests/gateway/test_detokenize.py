"""Text from tokens: whole characters, stop strings across token borders."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.generation.detokenize import REPLACEMENT, ByteDecoder, StopMatcher, TextOutput, WindowDecoder
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
def test_byte_level_deltas_join_to_the_full_decode_of_any_tokens(ids: list[int], skip: bool) -> None:
    decoder = TOKENIZER.decoder(skip_special_tokens=skip)
    assert isinstance(decoder, ByteDecoder)
    text = "".join(map(decoder.push, ids)) + decoder.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(TEXTS)
def test_deltas_join_to_the_text_and_none_holds_a_part_of_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for decoder in (TOKENIZER.decoder(), window_decoder()):
        deltas = list(map(decoder.push, ids))
        assert not any(REPLACEMENT in delta for delta in deltas) or REPLACEMENT in text
        assert "".join(deltas) + decoder.finish() == text


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


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@example(["a", "b"], ["b", "ab"])
def test_stop_strings_cut_wherever_token_borders_fall_and_no_beginning_of_one_is_emitted(
    deltas: list[str], stops: list[str]
) -> None:
    matcher, emitted = StopMatcher(stops), ""
    whole, stopped = reference("".join(deltas), stops)
    for delta in deltas:
        emitted += matcher.push(delta)
        assert whole.startswith(emitted)
    assert (emitted + matcher.finish(), matcher.stopped) == (whole, stopped)


@given(ANY_TOKENS, st.lists(st.sampled_from(["e", "the", " a", "\n", "ab"]), max_size=3), st.booleans())
@example(TOKENIZER.encode("at the end"), ["the"], True)
def test_output_is_the_full_decode_cut_at_the_first_stop(ids: list[int], stops: list[str], includes_stop: bool) -> None:
    """Where a stop belongs to the text, behind its last character."""
    stops = stops[:1] if includes_stop else stops
    output = TextOutput(TOKENIZER.decoder(), stops, includes_stop=includes_stop)
    emitted = ""
    for token_id in ids:
        emitted += output.push(token_id)
        if output.stopped:
            break
    emitted += output.finish()
    expected, stopped = reference(TOKENIZER.decode(ids, skip_special_tokens=True), stops)
    expected += stops[0] if stopped and includes_stop else ""
    assert (emitted, output.stopped) == (expected, stopped)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    ids = TOKENIZER.encode(" to be or not to be", add_special_tokens=False)
    output = TextOutput(TOKENIZER.decoder(), [" be"], min_tokens=len(ids) - 1)
    text = "".join(map(output.push, ids)) + output.finish()
    assert text == " to be or not to"


def test_tokens_beyond_the_tokenizer_have_no_text() -> None:
    assert TOKENIZER.decoder().push(TOKENIZER.size) == ""
