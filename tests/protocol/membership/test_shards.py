from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.shards import Shard, in_order, routing_key

ADDRESSES = st.lists(st.sampled_from([f"10.0.0.{n}:7100" for n in range(9)]), min_size=2, unique=True)
WEIGHTS = st.lists(st.sampled_from([0.0, 1.0, 30.0]), min_size=9, max_size=9)
A, B, C, D = (BlockKey(letter * 16) for letter in (b"a", b"b", b"c", b"d"))


@given(ADDRESSES, WEIGHTS, st.binary(min_size=1, max_size=32))
def test_a_shard_that_leaves_moves_only_its_keys_each_to_the_next_in_order(
    addresses: list[str], weights: list[float], key: bytes
) -> None:
    shards = [Shard(address=a, weight=w) for a, w in zip(addresses, weights, strict=False)]
    before = in_order(key, shards)
    for gone in shards:
        assert in_order(key, [s for s in shards if s is not gone]) == [s for s in before if s is not gone]


def test_shards_have_keys_in_proportion_to_their_weights() -> None:
    shards = [Shard(address=f"host:{weight}", weight=float(weight)) for weight in (0, 1, 3, 6)]
    first = Counter(in_order(number.to_bytes(4, "big"), shards)[0].weight for number in range(10_000))
    assert [abs(first[s.weight] / 1_000 - s.weight) < 0.2 for s in shards] == [True] * 4
    assert in_order(b"any", shards)[-1].weight == 0


def test_a_prompt_is_routed_by_its_first_block_that_is_not_hot() -> None:
    hot = {A: 2, C: 1}
    assert routing_key((B, C), hot, b"id") == B
    assert routing_key((A, B, D), hot, b"id") == D  # prompts that begin with A differ in their third block
    assert routing_key((A, B, C, D), hot, b"id") == D  # C is hot as well; a branch before it does not lead back
    assert routing_key((A, B), hot, b"id") == routing_key((), {}, b"id") == b"id"
