"""The factory of random models makes checkpoints that other libraries load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.random_models import EOS, FAMILIES, IM_START, make_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_loads_in_transformers(family: str, tmp_path: Path) -> None:
    made = make_model(family, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == [type(made).__name__]


def test_the_tokenizer_returns_every_text_unchanged(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("Hello, world!\n", "grüße 日本 🙂", " \t ~"):
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.token_to_id("<|eos|>") == EOS


def test_the_chat_template_renders(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text)["input_ids"][0] == IM_START
