"""The shipped demo model is complete and consistent, and its training parts are deterministic."""

import argparse
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from docs.demo_model import training_data
from docs.demo_model.tokenizer import BOS, EOS, IM_END, IM_START, PAD, SPECIAL_IDS, VOCABULARY_SIZE
from moonserve.models import demo_model_path

AWKWARD_TEXTS = (
    "",
    "def f(x):\n    if x:\n\t\treturn  x\n\n\n\nclass A: pass   \n",
    "naïve — \U0001f600 \x00\x7f\r\n\r\n \t mixed\n \n",
    "1234567 + 0x1F_FF != 1e-5  # ok?",
    "<|not_special|> </s> <|im_start",
)


def read_json(name: str) -> dict[str, object]:
    """Reads a JSON file of the shipped model."""
    return json.loads((demo_model_path() / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Loads the shipped tokenizer."""
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))


# -- tokenizer


@pytest.mark.parametrize("text", AWKWARD_TEXTS)
def test_decoding_an_encoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_vocabulary_has_the_configured_size_and_prompts_begin_with_bos(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE == read_json("config.json")["vocab_size"]
    assert tokenizer.encode("import os").ids[0] == SPECIAL_IDS[BOS]
    assert tokenizer.decode(list(SPECIAL_IDS.values()), skip_special_tokens=True) == ""


def test_python_takes_at_most_one_token_per_3_3_bytes_and_one_per_line_break(tokenizer: Tokenizer) -> None:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    text = Path(argparse.__file__).read_text(encoding="utf-8")
    assert len(text.encode()) / count(text) >= 3.3
    assert [count("\n" + " " * indentation) for indentation in range(0, 17, 4)] == [1] * 5


# -- special tokens, configuration, weights


def test_special_ids_agree_in_all_files(tokenizer: Tokenizer) -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_IDS}
    assert ids == SPECIAL_IDS
    assert config["bos_token_id"] == generation["bos_token_id"] == ids[BOS]
    assert config["eos_token_id"] == ids[EOS]
    assert config["pad_token_id"] == generation["pad_token_id"] == ids[PAD]
    assert generation["eos_token_id"] == [ids[EOS], ids[IM_END]]


# -- chat template


def test_the_chat_template_renders_roles_and_the_generation_prompt() -> None:
    from transformers import AutoTokenizer  # the import takes seconds

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write f"},
        {"role": "assistant", "content": "def f(): pass"},
        {"role": "user", "content": "Again"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = [f"{IM_START}{each['role']}\n{each['content']}{IM_END}\n" for each in messages]
    assert rendered == f"{BOS}{''.join(turns)}{IM_START}assistant\n"
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert ids.count(SPECIAL_IDS[IM_START]) == len(messages) + 1


# -- corpus and samples


def test_training_record_names_the_current_corpus_rules() -> None:
    assert read_json("corpus.json")["rules"] == training_data.describe_corpus({}, {})["rules"]
