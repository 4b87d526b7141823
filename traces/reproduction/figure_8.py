"""Figure 8 of FAST'25: device time per prompt, compared with vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from traces.reproduction.figure import CONVERSATION, Figure, Finding, Results, Row, Subject
from traces.reproduction.testbed import (
    VLLM,
    VLLM_CACHING,
    VLLM_CHUNKED,
    hit_ratio,
    mean_device_s,
    pooled,
)
from traces.simulator.many import Run, Work

_PUBLISHED = {"vLLM": 1.56, "vLLM with prefix caching": 1.43, "vLLM with chunked prefill": 1.90}

_WHY = (
    "The pool saves what it finds: with all the hits that the trace has (0.373 of the tokens) plain vLLM would cost"
    " 1.6 times as much, and what is missing to it are blocks that were computed twice before the first copy was"
    " stored, or evicted. Prefix caching in device memory is local to one of sixteen machines and sees a"
    " sixteenth of the sessions. A chunk's step takes as long as its decodes and its tokens one after the other;"
    " ours counts the whole step to the prompts in it, as a clock around the step would."
)


def runs(_subject: Subject) -> Mapping[str, Work]:
    return {
        "pool": pooled(),
        "vLLM": Run(spec=VLLM),
        "vLLM with prefix caching": Run(spec=VLLM_CACHING),
        "vLLM with chunked prefill": Run(spec=VLLM_CHUNKED),
    }


def finding(subject: Subject, results: Results) -> Finding:
    pool = mean_device_s(results["pool"])
    ratios = {name: mean_device_s(results[name]) / pool for name in _PUBLISHED}
    rows = [Row(f"{name} ÷ pool", ratios[name], subject.published(published)) for name, published in _PUBLISHED.items()]
    rows += [
        Row("device time of a prompt, pool", pool, unit="s"),
        Row("saved against plain vLLM", 1 - 1 / ratios["vLLM"], subject.published(0.36), unit="%"),
        Row("hit ratio of the pool", hit_ratio(results["pool"]), unit="%"),
    ]
    order = [ratios[f"vLLM{kind}"] for kind in (" with chunked prefill", "", " with prefix caching")]
    claims = {"chunked prefill > plain > prefix caching > pool": order[0] > order[1] > order[2] > 1}
    if subject.is_conversation:
        claims["plain ÷ pool is 1.54 ± 0.08"] = abs(ratios["vLLM"] - 1.54) <= 0.08
    return Finding(rows=tuple(rows), claims=claims, why=_WHY)


FIGURE = Figure(
    name="figure-8",
    title="Figure 8: device time of prefill",
    setting="16 machines in all cases, the trace at its own speed. Device time: seconds in which the machine computes a"
    " prompt.",
    runs=runs,
    finding=finding,
    published_for=CONVERSATION,
)
