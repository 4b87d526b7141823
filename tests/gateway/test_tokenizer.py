"""The same tokens and prompts as transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer, _converted, load_tokenizer
from protocol.errors import ConfigError, InvalidRequest
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
def test_texts_encode_and_decode_as_transformers_does(text: str, special: bool) -> None:
    ids = OURS.encode(text, add_special_tokens=special)
    assert ids == REFERENCE.encode(text, add_special_tokens=special)
    assert OURS.decode(ids) == REFERENCE.decode(ids)


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_the_models_chat_template_renders_as_transformers_does(generation_prompt: bool) -> None:
    text = OURS.template.render(MESSAGES, add_generation_prompt=generation_prompt)
    assert text == REFERENCE.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=generation_prompt)
    ids = REFERENCE.apply_chat_template(MESSAGES, add_generation_prompt=generation_prompt, return_dict=True)[
        "input_ids"
    ]
    assert OURS.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_templates_may_use_means_the_same_as_in_transformers(name: str) -> None:
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
def test_a_template_that_fails_or_reaches_out_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_jinja_file_and_dict_tokens_are_read(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(MODEL / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|bos|>"}, "chat_template": "from the config"})
    )
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.template.render(MESSAGES[1:]) == "<|bos|>hi\n"
    assert tokenizer.eos_token_ids == {1}


def test_a_folder_without_a_readable_tokenizer_or_template_is_a_configuration_error(tmp_path: Path) -> None:
    """One without any template refuses chats."""
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


def test_what_transformers_converts_gives_the_same_text() -> None:
    converted = Tokenizer(_converted(MODEL), None, frozenset())
    text = "naïve 日本 text"
    ids = converted.encode(text)
    assert ids == OURS.encode(text)
    decoder = converted.decoder()
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


def test_a_tokens_bytes_are_exact_even_within_a_character() -> None:
    ids = OURS.encode("日本", add_special_tokens=False)
    assert b"".join(map(OURS.token_bytes, ids)).decode() == "日本"
    assert OURS.longest_token >= 10
