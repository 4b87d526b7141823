"""Figure 5 of FAST'25: mean TTFT by how the prefill machine is chosen."""

from __future__ import annotations

from collections.abc import Mapping

from traces.reproduction.figure import CONVERSATION, Claim, Figure, Finding, Results, Row, Subject
from traces.reproduction.testbed import mean_ttft_s, pooled
from traces.simulator.many import Work

_POLICIES = {  # the paper's name → ours, its seconds on the conversation trace
    "random": ("random", 19.65),
    "load balance": ("least-loaded", 5.27),
    "local cache-aware": ("local-cache-aware", 3.58),
    "global cache-aware": ("global-cache-aware", 3.07),
}

_OWN = "moonserve"  # not in the paper: this project's policy

_WHY = (
    "Ours are shorter throughout, since a simulated machine computes a prompt in the time of the published latency"
    " figure and nothing else: no tokenizer, no engine between chunks. A queue magnifies such differences: with the"
    " pool ours are busy 46 % of the time; were prompts to take half as long again, they would be busy 69 % and"
    " wait four times as long (by the formula for Poisson arrivals and equal prompts). What the figure shows is the"
    " order, and the distance of the last two. Random is bounded only by the length of the trace: queues of unlucky"
    " machines hardly drain."
)


def runs(_subject: Subject) -> Mapping[str, Work]:
    published: dict[str, Work] = {
        name: pooled(policy=policy) for name, (policy, _) in _POLICIES.items()
    }
    return {**published, _OWN: pooled(policy=_OWN)}


def finding(subject: Subject, results: Results) -> Finding:
    ours = {name: mean_ttft_s(results[name]) for name in _POLICIES}
    rows = [
        Row(
            what=f"mean TTFT, {name}",
            ours=ours[name],
            published=subject.published({CONVERSATION: published}),
            unit="s",
        )
        for name, (_, published) in _POLICIES.items()
    ]
    ratio = ours["global cache-aware"] / ours["local cache-aware"]
    rows.append(
        Row(
            what="global ÷ local cache-aware",
            ours=ratio,
            published=subject.published({CONVERSATION: 3.07 / 3.58}),
        )
    )
    rows.append(
        Row(
            what=f"mean TTFT, {_OWN}",
            ours=mean_ttft_s(results[_OWN]),
            unit="s",
            why="our own policy",
        )
    )
    ordered = list(ours.values())
    return Finding(
        rows=tuple(rows),
        claims=(
            Claim(
                text="random > load balance > local > global cache-aware",
                holds=ordered == sorted(ordered, reverse=True) and len(set(ordered)) == 4,
            ),
            Claim(text="global at most 0.90 of local", holds=ratio <= 0.90),
        ),
        why=_WHY,
    )


FIGURE = Figure(
    name="figure-5",
    title="Figure 5: TTFT by scheduler",
    setting="8 prefill and 8 decode machines, the trace at its own speed, nobody rejected.",
    runs=runs,
    finding=finding,
    published_for=CONVERSATION,
)
