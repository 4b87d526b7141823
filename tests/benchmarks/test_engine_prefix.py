"""The prefix index's benchmarks: what they load is what they say, and both indices agree about it."""

from __future__ import annotations

from benchmarks.engine import prefix, store_writes
from engine.prefix import RadixTree
from protocol.keys import BlockKey
from traces.format import TOKENS_PER_HASH, TraceRecord

NUM_BLOCKS = 20_000


def test_both_indices_keep_the_same_blocks_through_a_round() -> None:
    left = []
    for make_index in prefix.INDICES.values():
        load = prefix.Load(NUM_BLOCKS, make_index)
        for figure in prefix.FIGURES:
            assert getattr(load, figure)() >= 0
        load.pool.validate()
        left.append(set(load.pool.keys()))
    assert left[0] == left[1]
    assert NUM_BLOCKS - prefix.PROMPT < len(left[0]) <= NUM_BLOCKS


def test_prompts_of_a_conversation_begin_alike_and_are_there_to_be_matched() -> None:
    load = prefix.Load(NUM_BLOCKS, RadixTree)
    keys = prefix.prompt(0, 0)
    assert len(set(keys)) == prefix.PROMPT
    assert prefix.prompt(0, 1)[: prefix.COMMON] == keys[: prefix.COMMON]
    assert prefix.prompt(0, 1)[prefix.COMMON] != keys[prefix.COMMON]
    assert len(load.pool.match_prefix(keys)) == prefix.PROMPT


def record(number: int, *hash_ids: int) -> TraceRecord:
    return TraceRecord(
        arrived_s=float(number),
        input_length=TOKENS_PER_HASH * len(hash_ids),
        output_length=1,
        hash_ids=hash_ids,
    )


def test_a_store_that_gets_nothing_serves_nothing_and_one_that_gets_all_serves_what_devices_lost() -> (
    None
):
    """Two prompts of ten blocks in turns, of which a device holds one."""
    records = [record(n, *range(100 * (n % 2), 100 * (n % 2) + 10)) for n in range(40)]
    device = 10 * TOKENS_PER_HASH / 1e6
    rules = {rule.name: rule for rule in store_writes.RULES}
    nothing = store_writes.simulate(records, rules["none"], device, 1.0)
    everything = store_writes.simulate(records, rules["all"], device, 1.0)
    assert nothing["written"] == 0
    assert nothing["hit_ratio"] == nothing["of_device"]
    assert everything["written"] == 20 / 400
    assert everything["hit_ratio"] == 380 / 400


def test_a_hot_block_is_written_once_it_was_found_as_often_as_the_rule_says() -> None:
    worker = store_writes.Worker(100, store := store_writes.Store(100), store_writes.RULES[2])
    keys = [BlockKey(bytes([number]) * 16) for number in range(5)]
    written = []
    for _ in range(4):
        worker.serve(keys)
        written.append(store.num_written)
    assert written == [0, 0, 5, 5]
