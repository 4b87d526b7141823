"""A conductor decides alike with and without a compiler: same instances and sources, same predictions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.decision import Decision
from conductor.events import Event, Heartbeat, Load, Phase, Report, Steps, Traffic
from conductor.limits import Limits
from conductor.native import base
from conductor.native.flows import FLOW_COLUMNS, Flows, Links, NativeFlows, flow_kernel
from conductor.native.sequences import SequenceKernel
from conductor.policies import make_policy
from conductor.policies.least_added_delay import LeastAddedDelay, Terms
from conductor.state import ConductorState
from protocol.ids import InstanceId, RequestId, Role
from protocol.native import C_FLAGS
from protocol.profile import DecodeProfile, PrefillProfile
from tests.compilers import compile_strictly, need_compiler
from tests.conductor.cluster import Cluster, chain, worker
from tests.thoroughness import examples

LIMITS = Limits(ttft_slo_s=60.0, tbt_slo_s=2.0, lease_s=1e6, tenant_weights={"t": 2.0})
POLICIES = ["global-cache-aware", "local-cache-aware", "session-affinity"]
TERMS = st.builds(
    Terms,
    patience=st.sampled_from([0.0, 5.0]),
    keeps_objective=st.booleans(),
    steepness=st.sampled_from([None, 4.0]),
    counts_delayed=st.booleans(),
)


@contextmanager
def no_compiler() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conductor.transfers.flow_kernel", Flows)
        patch.setattr("conductor.outlook.sequence_kernel", SequenceKernel)
        patch.setattr("conductor.policies.least_added_delay.prefill_library", lambda: None)
        yield


def cluster_of(policy: str | Terms) -> Cluster:
    """Three of each role; no two are alike, so that nothing hangs on the last bit of a prediction."""
    cluster = Cluster(validates=False)
    chosen = LeastAddedDelay(policy) if isinstance(policy, Terms) else make_policy(policy, 1.25)
    cluster.state = ConductorState(chosen, LIMITS)
    for number in range(3):
        cluster.store(f"s{number}", host=f"h{number}")
        prefill = worker(f"p{number}", Role.PREFILL, host=f"h{number}", home=f"s{number}")
        profile = PrefillProfile(c0=0.01 * number, c1=0.01 + 1e-4 * number, c2=1e-6)
        cluster.join(replace(prefill, prefill_profile=profile, max_num_batched_tokens=60 * number))
        decode = replace(worker(f"d{number}", Role.DECODE), num_blocks=60, max_num_seqs=number * 2)
        steps = DecodeProfile(c0=0.01, c1=0.01 + 1e-3 * number, c2=1e-5)
        cluster.join(replace(decode, decode_profile=steps))
    return cluster


def history(seed: int, policy: str | Terms) -> list[Decision]:
    """What is decided while prompts of a few conversations come, end and are told of in heartbeats."""
    draw, cluster = random.Random(seed), cluster_of(policy)
    decisions = []
    for number in range(40):
        cluster.now += draw.choice([0.0, 0.01, 0.3, 2.0])
        tokens = draw.randint(1, 300)
        cluster.ask(
            f"r{number}",
            block_keys=chain(draw.choice("abc"), tokens // 10),
            num_prompt_tokens=tokens,
            max_tokens=draw.choice([1, 10, 100, 1000]),
            ttft_slo_s=draw.choice([None, 1.0, 8.0, math.inf]),
            tenant=draw.choice(["", "", "", "t"]),
        )
        decided = cluster.state.explain(f"r{number}")
        assert decided is not None
        decisions.append(decided)
        cluster.state.handle(happening(cluster, draw, number), cluster.now)
    cluster.state.validate()
    return decisions


def happening(cluster: Cluster, draw: random.Random, newest: int) -> Event:
    """A report, or a heartbeat of one of three instances."""
    number, role = draw.randint(0, 2), draw.choice(["report", "s", "p", "d"])
    if role == "report":
        request_id, phase = RequestId(f"r{draw.randint(0, newest)}"), draw.choice([*Phase])
        took = {"elapsed_s": 0.5, "prefill_s": draw.random(), "output_tokens": draw.randint(1, 50)}
        return Report(request_id=request_id, phase=phase, **took)
    total = float(newest + 1)
    load = {
        "s": Load(),
        "p": Load(
            num_waiting=draw.choice([0, 0, 30]),
            queued_tokens=draw.randint(0, 900),
            traffic=(Traffic(peer=InstanceId("s1"), read_bytes=newest << 24, read_s=total * 0.05),),
        ),
        "d": Load(
            num_running=draw.randint(0, 5),
            free_blocks=draw.randint(5, 60),
            context_tokens=300,
            steps=Steps(
                num_steps=newest, seconds=total * 0.1, sequences=total, context_tokens=total
            ),
        ),
    }[role]
    if role == "s":
        cluster.heartbeat(f"s{number}", holds=chain(draw.choice("abc"), draw.randint(1, 25)))
    return Heartbeat(instance_id=InstanceId(f"{role}{number}"), epoch=1, load=load)


def chosen(decision: Decision) -> tuple[object, ...]:
    return decision.prefill, decision.decode, decision.sources, decision.rejection is None


def predicted(decision: Decision) -> list[Any]:
    numbers = [decision.predicted_ttft_s, decision.predicted_tbt_s, decision.rank]
    for columns in (decision.prefill_columns, decision.decode_columns):
        for column in columns[1:]:
            numbers += np.ravel(column).tolist()
    return numbers


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 10**6), policy=st.sampled_from([*POLICIES, Terms()]) | TERMS)
def test_with_and_without_a_compiler_the_same_is_decided(seed: int, policy: str | Terms) -> None:
    need_compiler()
    assert isinstance(flow_kernel(), NativeFlows)
    native, twin = (under(context, seed, policy) for context in (nullcontext(), no_compiler()))
    assert [chosen(d) for d in native] == [chosen(d) for d in twin]
    for one, other in zip(native, twin, strict=True):
        assert predicted(one) == pytest.approx(predicted(other), rel=1e-9, abs=1e-9)


def under(context: AbstractContextManager[None], seed: int, policy: str | Terms) -> list[Decision]:
    with context:
        return history(seed, policy)


def test_one_kernel_serves_books_of_any_size_in_any_order_and_refuses_what_c_cannot_read() -> None:
    need_compiler()
    for size in (2, 3_000, 5):
        hosts, rates = np.arange(size, dtype=np.int64), np.full(2 * size, 100.0)
        links = Links(hosts, rates, rates.copy())
        rows = np.array([(0, 2 * i, 50.0, 100.0) for i in range(1, size)])
        flow_kernel().advance(rows, links, 1e9)
        found = flow_kernel().seconds(rows, links, 0, hosts[1:], np.full(size - 1, 200.0), None)
        assert found.tolist() == [2.0] * (size - 1)
    with pytest.raises((TypeError, ValueError)):
        flow_kernel().advance(np.zeros((FLOW_COLUMNS, 4)).T, links, 1.0)


@pytest.mark.parametrize(
    "source", sorted(Path(base.__file__).parent.glob("*.c")), ids=lambda path: path.name
)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_complain_about(
    compiler: str, source: Path, tmp_path: Path
) -> None:
    compile_strictly(compiler, source, C_FLAGS, tmp_path)
