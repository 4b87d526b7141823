"""A conductor decides alike with and without a compiler: same instances and sources, same predictions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.decision import Decision
from conductor.events import Load, Phase
from conductor.limits import Limits
from conductor.native.flows import NativeFlows, PythonFlows, flow_kernel
from conductor.native.sequences import PythonSequences
from kvstore.native.holders import PythonHolders
from protocol.ids import RequestId
from tests.compilers import need_compiler
from tests.conductor.cluster import Cluster, chain
from tests.thoroughness import examples

LIMITS = Limits(ttft_slo_s=60.0, tbt_slo_s=2.0, lease_s=1e6)


@contextmanager
def no_compiler() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conductor.cost.flows.flow_kernel", PythonFlows)
        patch.setattr("conductor.outlook.sequence_kernel", PythonSequences)
        patch.setattr("conductor.policies.least_added_delay.prefill_library", lambda: None)
        patch.setattr("kvstore.directory.index.holder_kernel", PythonHolders)
        yield


def history(seed: int, policy: str) -> list[Decision]:
    """What is decided while prompts of a few conversations come, end and are told of in heartbeats."""
    draw = random.Random(seed)
    cluster = Cluster(threshold=1.25, limits=LIMITS, policy=policy)
    for number in range(3):
        cluster.store(f"s{number}", host=f"h{number}")
        cluster.prefill(f"p{number}", host=f"h{number}", home=f"s{number}")
        cluster.decode(f"d{number}", num_blocks=60)
    decisions = []
    for number in range(30):
        cluster.now += draw.choice([0.0, 0.01, 0.3, 2.0])
        tokens = draw.randint(1, 200)
        cluster.ask(
            f"r{number}",
            block_keys=chain(draw.choice("abc"), tokens // 10),
            num_prompt_tokens=tokens,
            max_tokens=draw.randint(1, 100),
        )
        decided = cluster.state.explain(RequestId(f"r{number}"))
        assert decided is not None
        decisions.append(decided)
        _happen(cluster, draw, number)
    return decisions


def _happen(cluster: Cluster, draw: random.Random, newest: int) -> None:
    phase = draw.choice([None, *Phase])
    if phase is not None:
        output = draw.randint(1, 50)
        cluster.report(f"r{draw.randint(0, newest)}", phase, 0.5, output, prefill_s=draw.random())
    number = draw.randint(0, 2)
    match draw.choice(["none", "store", "decode"]):
        case "store":
            cluster.heartbeat(f"s{number}", holds=chain(draw.choice("abc"), draw.randint(1, 20)))
        case "decode":
            load = Load(num_running=draw.randint(0, 5), free_blocks=40, context_tokens=300)
            cluster.heartbeat(f"d{number}", load)


def chosen(decision: Decision) -> tuple[object, ...]:
    return decision.prefill, decision.decode, decision.sources, decision.rejection is None


def predicted(decision: Decision) -> list[float]:
    numbers = [decision.predicted_ttft_s, decision.predicted_tbt_s, decision.rank]
    for candidate in (*decision.prefill_candidates, *decision.decode_candidates):
        numbers += [value for value in candidate if not isinstance(value, str)]
    return numbers


@settings(max_examples=examples(15))  # a history of many decisions each
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["global-cache-aware", "moonserve", "local-cache-aware"]),
)
def test_with_and_without_a_compiler_the_same_is_decided(seed: int, policy: str) -> None:
    need_compiler()
    assert isinstance(flow_kernel(), NativeFlows)
    native, twin = (_under(context, seed, policy) for context in (nullcontext(), no_compiler()))
    assert [chosen(d) for d in native] == [chosen(d) for d in twin]
    for one, other in zip(native, twin, strict=True):
        assert predicted(one) == pytest.approx(predicted(other), rel=1e-9, abs=1e-9)


def _under(context: AbstractContextManager[None], seed: int, policy: str) -> list[Decision]:
    with context:
        return history(seed, policy)
