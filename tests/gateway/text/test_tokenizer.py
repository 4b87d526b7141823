"""Tokens and prompts equal those of transformers. Text comes in whole characters; stop strings may span tokens."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from moonserve.gateway.text.chat_template import ChatTemplate
from moonserve.gateway.text.detokenizer import REPLACEMENT, ByteDecoder, StopMatcher, TextOutput, WindowDecoder
from moonserve.gateway.text.tokenizer import Tokenizer, _converted, load_tokenizer
from moonserve.protocol.errors import ConfigError, InvalidRequest
from tests.gateway.conftest import MODEL

REFERENCE = AutoTokenizer.from_pretrained(MODEL)
OURS = load_tokenizer(MODEL)
MESSAGES = [
    {"role": "system", "content": "You are <b>terse</b> & 日本."},
    {"role": "user", "content": "hi\n", "name": None},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "again"},
]
TEMPLATES = {
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}|{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) }}",
    "trimming": "{% for m in messages %}\n    {% if true %}\n  x{{ m.content }}\n{% endif %}\n{% endfor %}",
    "absent": "{% for m in messages %}{{ 'name' in m }}{{ tools is none }}{{ bos_token }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "variable": "{{ enable_thinking | default('unset') }}{{ add_generation_prompt }}",
}


@given(st.text(max_size=60), st.booleans())
def test_encode_and_decode_match_transformers(text: str, special: bool) -> None:
    ids = OURS.encode(text, add_special_tokens=special)
    assert ids == REFERENCE.encode(text, add_special_tokens=special)
    assert OURS.decode(ids) == REFERENCE.decode(ids)


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_chat_template_renders_as_in_transformers(generation_prompt: bool) -> None:
    text = OURS.template.render(MESSAGES, add_generation_prompt=generation_prompt)
    assert text == REFERENCE.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generation_prompt)
    ids = REFERENCE.apply_chat_template(MESSAGES, add_generation_prompt=generation_prompt, return_dict=True)[
        "input_ids"
    ]
    assert OURS.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_functions_match_transformers(name: str) -> None:
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<|bos|>"})
    theirs = REFERENCE.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True, enable_thinking="yes"
    )
    assert ours.render(MESSAGES, variables={"enable_thinking": "yes"}) == theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[99].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{{ 1 // 0 }}",
        "{{ messages | map(attribute='content') | sum }}",
    ],
)
def test_failing_or_escaping_template_raises_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(MESSAGES)


def test_jinja_file_and_dict_tokens_are_read(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(MODEL / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>"}, "chat_template": "from the config"})
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.template.render(MESSAGES[1:]) == "<|bos|>hi\n"
    assert tokenizer.eos_token_ids == {1}


def test_unreadable_tokenizer_or_template_raises_config_error(tmp_path: Path) -> None:
    """A folder without any template is accepted and refuses chats."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidRequest, match="no chat template"):
        load_tokenizer(tmp_path).template.render(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    broken = [tmp_path, tmp_path / "absent", tmp_path / "empty"]
    broken[2].mkdir()
    for number, content in enumerate(("{", "[]")):
        broken.append(tmp_path / str(number))
        broken[-1].mkdir()
        (broken[-1] / "tokenizer.json").write_text(content)
    for folder in broken:
        with pytest.raises(ConfigError):
            load_tokenizer(folder)


def test_converted_tokenizer_gives_the_same_text() -> None:
    converted = Tokenizer(_converted(MODEL), None, frozenset())
    text = "naïve 日本 text"
    ids = converted.encode(text)
    assert ids == OURS.encode(text)
    decoder = converted.decoder()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


def test_token_bytes_are_exact_within_a_character() -> None:
    ids = OURS.encode("日本", add_special_tokens=False)
    assert b"".join(map(OURS.token_bytes, ids)).decode() == "日本"
    assert OURS.longest_token >= 10


TEXTS = st.text(max_size=40)
ANY_TOKENS = st.lists(st.integers(0, OURS.size - 1), max_size=40)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Slow reference: cuts at the first end of any stop string, and there removes the longest match."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@given(ANY_TOKENS, st.booleans())
def test_byte_level_deltas_join_to_the_full_decode_of_any_tokens(ids: list[int], skip: bool) -> None:
    decoder = OURS.decoder(skip_special_tokens=skip)
    assert isinstance(decoder, ByteDecoder)
    text = "".join(map(decoder.push, ids)) + decoder.finish()
    assert text == OURS.decode(ids, skip_special_tokens=skip)


@given(TEXTS)
def test_deltas_join_to_the_text_and_hold_whole_characters(text: str) -> None:
    ids = OURS.encode(text, add_special_tokens=False)
    windowed = WindowDecoder(lambda ids: OURS.decode(ids, skip_special_tokens=True))
    for decoder in (OURS.decoder(), windowed):
        deltas = list(map(decoder.push, ids))
        assert not any(REPLACEMENT in delta for delta in deltas) or REPLACEMENT in text
        assert "".join(deltas) + decoder.finish() == text


def test_window_of_invalid_bytes_stays_short() -> None:
    """Decoding stays linear for a model that produces only broken characters."""
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return OURS.decode(ids)

    decoder = WindowDecoder(decode)
    broken = next(t for t in range(OURS.size) if OURS.token_bytes(t) == b"\xe6")
    text = "".join(decoder.push(broken) for _ in range(500))
    assert max(lengths) <= 32
    assert len(text) >= 400


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@example(["a", "b"], ["b", "ab"])
def test_stop_strings_match_across_token_borders_and_are_not_emitted_in_part(
    deltas: list[str], stops: list[str]
) -> None:
    matcher, emitted = StopMatcher(stops), ""
    whole, stopped = reference("".join(deltas), stops)
    for delta in deltas:
        emitted += matcher.push(delta)
        assert whole.startswith(emitted)
    assert (emitted + matcher.finish(), matcher.stopped) == (whole, stopped)


@given(ANY_TOKENS, st.lists(st.sampled_from(["e", "the", " a", "\n", "ab"]), max_size=3), st.booleans())
@example(OURS.encode("at the end"), ["the"], True)
def test_output_is_the_full_text_cut_at_the_first_stop(ids: list[int], stops: list[str], includes_stop: bool) -> None:
    """The text ends before the first stop string, or after it if the output includes stops."""
    stops = stops[:1] if includes_stop else stops
    output = TextOutput(OURS.decoder(), stops, includes_stop=includes_stop)
    emitted = ""
    for token_id in ids:
        emitted += output.push(token_id)
        if output.stopped:
            break
    emitted += output.finish()
    expected, stopped = reference(OURS.decode(ids, skip_special_tokens=True), stops)
    expected += stops[0] if stopped and includes_stop else ""
    assert (emitted, output.stopped) == (expected, stopped)


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    ids = OURS.encode(" to be or not to be", add_special_tokens=False)
    output = TextOutput(OURS.decoder(), [" be"], min_tokens=len(ids) - 1)
    text = "".join(map(output.push, ids)) + output.finish()
    assert text == " to be or not to"


def test_token_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert OURS.decoder().push(OURS.size) == ""
