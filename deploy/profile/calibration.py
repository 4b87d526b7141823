"""The last step of a profile of serving: the probe's bursts, simulated until their first tokens come when they came.

Terms are measured one at a time, and what they do to each other on shared cores is in none of them: it makes every
prompt of a burst a few milliseconds longer. This goes into the turnover, the time between two prompts of a machine, of
which nothing else is known. One term is fitted, to one figure: the mean TTFT of all bursts. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deploy.profile.runs import Answered
from protocol.timeline import mean
from traces.format import TraceRecord
from traces.simulator.run import simulate
from traces.simulator.spec import ClusterSpec

_APART_S = 60.0  # between bursts, so that none meets another
_MOST_S = 0.25  # a turnover's
_HALVINGS = 12  # to a sixteenth of a millisecond


def calibrated(spec: ClusterSpec, bursts: Sequence[Sequence[Answered]]) -> ClusterSpec:
    """`spec` with another turnover; as it is where there was no burst."""
    if not bursts:
        return spec
    wanted_s = mean([each.token_at[0] - each.sent_at for burst in bursts for each in burst])
    records = _records(bursts, spec.block_size)
    low, high = 0.0, _MOST_S
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _mean_ttft_s(_with_turnover(spec, middle), records) < wanted_s:
            low = middle
        else:
            high = middle
    return _with_turnover(spec, low)


def _with_turnover(spec: ClusterSpec, seconds: float) -> ClusterSpec:
    overheads = replace(spec.model.overheads, turnover_s=seconds)
    return replace(spec, model=replace(spec.model, overheads=overheads))


def _mean_ttft_s(spec: ClusterSpec, records: Sequence[TraceRecord]) -> float:
    outcomes = simulate(spec, records).outcomes
    return mean([each.ttft_s for each in outcomes if each.ttft_s is not None])


def _records(bursts: Sequence[Sequence[Answered]], block_size: int) -> list[TraceRecord]:
    """In the order in which they were sent; no two prompts share a block."""
    records: list[TraceRecord] = []
    next_id = 0
    for number, burst in enumerate(bursts):
        for each in sorted(burst, key=lambda answered: answered.sent_at):
            num_blocks = -(-each.num_tokens // block_size)
            records.append(
                TraceRecord(
                    arrived_s=number * _APART_S,
                    input_length=each.num_tokens,
                    output_length=len(each.token_at),
                    hash_ids=tuple(range(next_id, next_id + num_blocks)),
                    tokens_per_hash=block_size,
                )
            )
            next_id += num_blocks
    return records
