"""Table 2 of FAST'25: number of requests, mean lengths, cacheable share of the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traces.analysis.prefixes import PrefixTree, prefix_tree
from traces.format import TraceRecord
from traces.reproduction.figure import (
    CONVERSATION,
    KINDS,
    SYNTHETIC,
    TOOL_AGENT,
    Figure,
    Finding,
    Results,
    Row,
    Subject,
)

_PUBLISHED = {
    CONVERSATION: (12_031, 12_035, 343, 0.40),
    TOOL_AGENT: (23_608, 8_596, 182, 0.59),
    SYNTHETIC: (3_993, 15_325, 149, 0.66),
}

_WHY = (
    "Counts and lengths are facts of the files. How the paper averaged its cache ratio is not said: the mean over"
    " requests of each one's cached share, the partial last block included, is nearest to its figure; by tokens, and"
    " of full blocks only, which is all that a block cache can supply, less is to be had. Every hit ratio"
    " elsewhere on this page is by tokens of full blocks."
)


def finding(subject: Subject, _results: Results) -> Finding:
    traces = {subject.kind or subject.name: subject.records, **subject.beside}
    rows = [row for name, records in traces.items() for row in _rows(name, records)]
    missing = [kind for kind in KINDS if kind not in traces]
    absent = f" Not beside the trace, and so not here: {', '.join(missing)}." if missing else ""
    exact = [r for r in rows if r.published and r.unit != "%"]
    claims = {}
    if exact:
        text = "requests and mean lengths are the published ones, to the digit"
        claims[text] = all(round(row.ours or 0) == row.published for row in exact)
    return Finding(rows=tuple(rows), claims=claims, why=_WHY + absent)


def _rows(name: str, records: Sequence[TraceRecord]) -> Iterator[Row]:
    requests, inputs, outputs, ratio = _PUBLISHED.get(name, (None,) * 4)
    count = len(records)
    tree = prefix_tree(records)
    yield Row(f"{name}: requests", count, published=requests)
    yield Row(
        f"{name}: mean input, tokens",
        sum(r.input_length for r in records) / count,
        published=inputs,
    )
    yield Row(
        f"{name}: mean output, tokens",
        sum(r.output_length for r in records) / count,
        published=outputs,
    )
    yield Row(
        f"{name}: cache ratio, mean over requests",
        _mean_of_shares(tree, records),
        published=ratio,
        unit="%",
    )
    yield Row(
        f"{name}: cache ratio, of all tokens, full blocks",
        _share_of_tokens(tree, records),
        published=ratio,
        unit="%",
    )


def _mean_of_shares(tree: PrefixTree, records: Sequence[TraceRecord]) -> float:
    shares = (
        min(visit.num_seen * record.tokens_per_hash / record.input_length, 1.0)
        for visit, record in zip(tree.visits, records, strict=True)
    )
    return sum(shares) / len(records)


def _share_of_tokens(tree: PrefixTree, records: Sequence[TraceRecord]) -> float:
    hits = sum(min(visit.num_seen, visit.usable) for visit in tree.visits)
    return hits * records[0].tokens_per_hash / sum(r.input_length for r in records)


FIGURE = Figure(name="table-2", title="Table 2: the traces", setting="Counted in the files.", finding=finding)
