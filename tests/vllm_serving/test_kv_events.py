"""vLLM's KV events give the conductor the keys under which gateways ask for a prompt's blocks."""

import pytest

from moonserve.protocol.kv_blocks import BlockKey, block_keys, root_key
from moonserve.vllm.serving.kv_event_state import CachedBlocks, Cleared, Removed, Stored

_ROOT = root_key("fingerprint")
_SIZE = 4
_TOKENS = tuple(range(12))
_KEYS = block_keys(_ROOT, _TOKENS, _SIZE)


class _Index:
    """What the conductor would know."""

    def __init__(self) -> None:
        self.parents: dict[BlockKey, BlockKey | None] = {}
        self.blocks = CachedBlocks(_ROOT, _SIZE, self.parents.__setitem__, self.parents.__delitem__)
        self.seq = 0

    def __call__(self, *changes: Stored | Removed | Cleared, skip: int = 0) -> list[BlockKey]:
        self.seq += skip
        self.blocks.apply(self.seq, changes)
        self.seq += 1
        return list(self.parents)


@pytest.fixture(name="index")
def fixture_index() -> _Index:
    return _Index()


def _stored(first: int, count: int, *, group: int | None = 0, salt: str = "", size: int = _SIZE) -> Stored:
    return Stored(
        hashes=tuple(f"h{number}".encode() for number in range(first, first + count)),
        parent=f"h{first - 1}".encode() if first else None,
        token_ids=_TOKENS[first * _SIZE : (first + count) * _SIZE],
        block_size=size,
        salt=salt,
        group=group,
    )


def test_stored_blocks_have_the_keys_of_their_tokens_and_their_parents(index: _Index) -> None:
    assert index(_stored(0, 2)) == _KEYS[:2]
    assert index(_stored(2, 1)) == _KEYS
    assert list(index.parents.values()) == [None, *_KEYS[:2]]


def test_a_block_that_is_stored_again_is_reported_once(index: _Index) -> None:
    index(_stored(0, 3))
    index.parents.clear()
    assert index(_stored(0, 3)) == []


def test_removed_blocks_are_gone_also_from_the_middle(index: _Index) -> None:
    index(_stored(0, 3))
    assert index(Removed(hashes=(b"h1", b"unknown"), group=0)) == [_KEYS[0], _KEYS[2]]
    assert index(Cleared()) == []


def test_other_groups_and_block_sizes_and_adapters_are_not_followed(index: _Index) -> None:
    foreign = Stored(hashes=(b"x",), parent=None, token_ids=_TOKENS[:4], block_size=_SIZE, is_foreign=True, group=3)
    assert index(foreign, _stored(0, 1, size=2), _stored(0, 1), _stored(1, 1, group=1)) == _KEYS[:1]
    assert index(Removed(hashes=(b"h0",), group=1)) == _KEYS[:1]


def test_a_chain_whose_beginning_is_unknown_is_not_reported(index: _Index) -> None:
    assert index(_stored(1, 2)) == []


def test_blocks_of_a_salted_chain_have_its_keys(index: _Index) -> None:
    keys = block_keys(root_key("fingerprint", "tenant"), _TOKENS, _SIZE)
    assert index(_stored(0, 3, salt=keys[0].hex())) == keys


def test_a_gap_is_noticed_and_what_is_not_repeated_is_forgotten(index: _Index) -> None:
    index(_stored(0, 1))
    assert index.blocks.misses(index.seq + 1)
    assert not index.blocks.misses(index.seq)
    assert index(_stored(0, 2), skip=1) == _KEYS[:2]
    assert index.blocks.num_gaps == 1
    assert index.blocks.next_seq == 3


def test_a_repeated_batch_changes_nothing(index: _Index) -> None:
    index(_stored(0, 2))
    index.blocks.apply(0, [Cleared()])
    assert list(index.parents) == _KEYS[:2]
