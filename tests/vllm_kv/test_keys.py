"""Keys, settings and held prompts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.kvstore.client.connecting import TOKEN_VARIABLE
from moonserve.protocol.errors import ConfigError, StaleLease
from moonserve.protocol.kv_blocks import block_keys, root_key
from moonserve.vllm.kv.chained_keys import ChainedKeys, StoredKeys
from moonserve.vllm.kv.handoff_state import HeldPrompts
from moonserve.vllm.kv.settings import ConnectorSettings, model_identity

ROOT = root_key("model")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(0, 40))
def test_keys_of_a_growing_sequence_are_those_of_the_whole(ids: list[int], cut: int) -> None:
    chain = ChainedKeys(ROOT, 4)
    chain.extend(ids[:cut], None)
    chain.extend(ids, None)
    assert chain.keys == block_keys(ROOT, ids, 4)


def test_what_the_kv_depends_on_beside_tokens_changes_the_keys_from_there_on() -> None:
    plain, salted = ChainedKeys(ROOT, 2), ChainedKeys(ROOT, 2)
    plain.extend(range(8), lambda first, last: b"")
    salted.extend(range(8), lambda first, last: b"image" if first == 4 else b"")
    assert [a == b for a, b in zip(plain.keys, salted.keys, strict=True)] == [True, True, False, False]


def test_groups_and_ranks_have_objects_of_their_own_in_one_chain() -> None:
    chain = ChainedKeys(ROOT, 2)
    chain.extend(range(6), None)
    blocks = [
        StoredKeys(name, group, rank).blocks(chain.keys, [0, 2])
        for name, group, rank in (("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("b", 0, 0))
    ]
    assert len({block.key for each in blocks for block in each}) == 8
    first, last = blocks[0]
    assert first.parent is None
    assert first.head == last.head == first.key
    assert last.parent == StoredKeys("a", 0, 0).blocks(chain.keys, [1])[0].key


def test_a_held_prompt_lives_as_long_as_its_reader_renews_it() -> None:
    held: HeldPrompts[int] = HeldPrompts(10.0)
    assert held.renewed("a", 0.0) is None
    assert held.hold("a", 1, 0.0)
    assert held.renewed("a", 9.0) == 1
    assert held.overdue(18.9) == []
    assert held.overdue(19.0) == ["a"]
    assert held.end(["a", "b"]) == [1]
    assert not held.hold("b", 2, 19.0)
    with pytest.raises(StaleLease):
        held.renewed("a", 20.0)
    assert len(held) == 0


def test_settings_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        ConnectorSettings.from_extra_config({})
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    with pytest.raises(ConfigError, match="'jion'"):
        ConnectorSettings.from_extra_config({"jion": "node://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="max_pinned"):
        ConnectorSettings.from_extra_config({"max_pinned": 0})
    assert ConnectorSettings.from_extra_config({"transports": ["tcp"]}).transports == ("tcp",)


def test_a_local_model_is_known_by_its_bytes_not_by_its_path(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 16_384
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, value in zip(folders, (weights, weights, weights[:-1] + b"x"), strict=True):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(value)
    one, same, other = (model_identity(str(folder), None, {"layers": 2}) for folder in folders)
    assert one == same != other
    assert model_identity(str(folders[0]), None, {"layers": 3}) != one
    assert model_identity("org/model", "main", {}) != model_identity("org/model", "v2", {})
