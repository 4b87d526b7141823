"""The prefix tree counts every use of every place, and tells who used it before."""

from __future__ import annotations

from hypothesis import given

from tests.traces.analysis.small import records_of, trees
from traces.analysis.prefixes import Run, prefix_tree
from traces.prompts import ideal_cached_tokens


@given(trees())
def test_the_tree_agrees_with_the_ideal_cache_of_a_replay(paths: list[list[int]]) -> None:
    records = records_of(paths, short=3)
    tree = prefix_tree(records)
    assert int(tree.uses.sum()) == sum(len(visit.blocks) for visit in tree.visits)
    for visit in tree.visits:
        assert [tree.depths[block] for block in visit.blocks] == list(range(len(visit.blocks)))
    usable = [min(visit.num_seen, visit.usable) * 512 for visit in tree.visits]
    assert usable == ideal_cached_tokens(records, 512)
    assert tree.num_blocks == len({i for record in records for i in record.hash_ids})


def test_runs_name_the_request_that_used_them_last() -> None:
    tree = prefix_tree(records_of([[0, 0, 0], [0, 1], [0, 0, 0, 0]]))
    assert tree.visits[0].runs == ()
    assert tree.visits[1].runs == (Run(0, 0, 1),)
    assert tree.visits[2].runs == (Run(1, 0, 1), Run(0, 1, 2))
    assert tree.uses.tolist() == [3, 2, 2, 1, 1]


def test_an_id_behind_two_prefixes_is_two_blocks() -> None:
    records = records_of([[0, 0], [1, 0]])
    swapped = [records[0], records_of([[1]])[0]]
    assert prefix_tree(records).num_blocks == 4
    assert prefix_tree(swapped).num_blocks == 2  # the same id behind the same nothing
