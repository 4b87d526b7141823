"""Defines the faults: which processes are hit, at which moment, and which wait of the client counts.

A scene starts a stream, waits for its moment, kills or stops processes, and reports the client's longest wait after
that. It starts on a complete cluster and ends when all processes are back.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.testbed import FaultCluster, StreamThread, stopped

STOPPED_S = 20.0
_BEGUN = 40  # tokens
_LONG, _SHORT = 6_000, 200  # tokens of a prompt
_ANSWER = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """Result of a scene. `waited_s`: longest wait for a token after the fault; `wrong`: wrong tokens or ids."""

    waited_s: float
    wrong: str = ""
    error: str = ""


TargetSelector = Callable[[FaultCluster, StreamThread], Sequence[str]]
"""Waits for the moment of the fault; returns the names of the processes to hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    select_targets: TargetSelector
    cluster: str = "two of each"
    number: signal.Signals = signal.SIGKILL
    prompt: int = _SHORT
    answer: int = _ANSWER
    uses_new_request: bool = False  # measures a new request right after the fault
    fillers: int = 0  # number of long prompts queued before it
    holds: str = ""  # prefix of processes stopped from before the request until the fault


def run_scenario(scene: Scenario, victims: FaultCluster, seed: int) -> ScenarioResult:
    """Plays a scene once. `seed` determines prompt and sampling; even seeds decode greedily."""
    prompt = random.Random(f"{scene.name} {seed}").choices(range(16, 4_000), k=scene.prompt)
    drawn = {"seed": seed, "temperature": float(seed % 2), "max_tokens": scene.answer}
    body: dict[str, Any] = {"prompt": prompt, **drawn}
    expected = victims.whole(body if scene.holds else {**body, "cache_salt": "undisturbed"})
    with victims.settled():
        fillers = [victims.ask(_filler(f"{scene.name} {seed} {n}")) for n in range(scene.fillers)]
        pids = victims.pids()
        held = [pid for name, pid in pids.items() if scene.holds and name.startswith(scene.holds)]
        with stopped(held):
            stream = victims.ask(body)
            hit = scene.select_targets(victims, stream)
        if scene.number is signal.SIGSTOP:
            with stopped([pids[name] for name in hit]):
                at = time.monotonic()
                asked = _follow(scene, victims, stream, body)
                time.sleep(max(0.0, at + STOPPED_S - time.monotonic()))
        else:
            at = time.monotonic()
            victims.kill(hit)
            asked = _follow(scene, victims, stream, body)
        for each in (stream, asked, *fillers):
            each.join()
    wrong = [_wrong(each, expected) for each in (stream, asked)]
    return ScenarioResult(
        waited_s=asked.longest_gap_s(at),
        wrong=next(filter(None, wrong), ""),
        error=next((each.error for each in (stream, asked, *fillers) if each.error), ""),
    )


def _wrong(stream: StreamThread, expected: Sequence[int]) -> str:
    """Describes a difference that a client would notice; "" = none."""
    if stream.token_ids != expected:
        pairs = enumerate(itertools.zip_longest(stream.token_ids, expected))
        place = next(place for place, (found, right) in pairs if found != right)
        return f"another token at {place} of {len(expected)}"
    return "" if len(stream.ids) == 1 else f"ids {stream.ids}"


def _filler(name: str) -> dict[str, Any]:
    prompt = random.Random(name).choices(range(16, 4_000), k=_LONG)
    return {"prompt": prompt, "max_tokens": 2, "temperature": 0}


def _follow(scene: Scenario, victims: FaultCluster, stream: StreamThread, body: dict[str, Any]) -> StreamThread:
    """Waits for the measured stream until its end, or until stopped processes continue; returns the stream."""
    asked = victims.ask(body) if scene.uses_new_request else stream
    asked.join(timeout=STOPPED_S if scene.number is signal.SIGSTOP else None)
    return asked


def _decoding(victims: FaultCluster, stream: StreamThread) -> str:
    """Waits until the answer has begun; returns the name of its decode worker."""
    victims.until(lambda: stream.count >= _BEGUN or stream.error)
    return stream.headers["x-decode-instance-id"]


def decode(victims: FaultCluster, stream: StreamThread) -> list[str]:
    return [_decoding(victims, stream)]


def handed_off(victims: FaultCluster, stream: StreamThread) -> list[str]:
    _decoding(victims, stream)
    return [stream.headers["x-prefill-instance-id"]]


def transferring(victims: FaultCluster, stream: StreamThread) -> list[str]:
    """Strikes at the first token, while KV is being transferred."""
    victims.until(lambda: stream.count or stream.error)
    return [stream.headers["x-prefill-instance-id"]]


def computing(victims: FaultCluster, stream: StreamThread) -> list[str]:
    victims.until(lambda: victims.prefill_of(stream) or stream.error)
    name = victims.prefill_of(stream)
    victims.until(lambda: 0 < victims.load(name).queued_tokens < _LONG or stream.count)
    return [name]


def placed(victims: FaultCluster, stream: StreamThread) -> list[str]:
    """Strikes once the request is placed: queued behind others, or waiting for its prefix."""
    victims.until(lambda: victims.prefill_of(stream) or stream.error)
    return [victims.prefill_of(stream)]


def all_named(prefix: str) -> TargetSelector:
    """Returns a strike at all processes with this prefix, once the answer has begun."""

    def strike(victims: FaultCluster, stream: StreamThread) -> list[str]:
        _decoding(victims, stream)
        return [name for name in victims.pids() if name.startswith(prefix)]

    return strike


def leading_conductor(victims: FaultCluster, stream: StreamThread) -> list[str]:
    _decoding(victims, stream)
    victims.until(victims.leader)
    return [victims.leader()]


ALONE = "one of each"
STANDBY = "one of each, two conductors, Redis"
FLAGS: Mapping[str, Sequence[str]] = {
    ALONE: ("--dtype", "float32", "--kernels", "native"),
    STANDBY: ("--dtype", "float32", "--kernels", "native"),
    "two of each": (
        *("--prefill-workers", "2", "--decode-workers", "2", "--store-nodes", "2"),
        *("--dtype", "float32", "--kernels", "native"),
        *("--max-num-batched-tokens", "128"),
    ),
    "two of each, prefixes in stores only": (
        *("--prefill-workers", "2", "--decode-workers", "2", "--store-nodes", "2"),
        *("--dtype", "float32", "--kernels", "native"),
        *("--max-num-batched-tokens", "128", "--no-enable-prefix-caching"),
    ),
}

KILLS: Sequence[Scenario] = (
    Scenario(name="decode worker, the only one", select_targets=decode, cluster=ALONE),
    Scenario(name="conductor, running stream", select_targets=all_named("conductor"), cluster=ALONE),
    Scenario(
        name="conductor, new request", select_targets=all_named("conductor"), uses_new_request=True, cluster=ALONE
    ),
    Scenario(name="gateway, resumed", select_targets=all_named("gateway"), cluster=ALONE),
    Scenario(
        name="prefill worker, loading",
        select_targets=placed,
        cluster="two of each, prefixes in stores only",
        prompt=_LONG,
        answer=60,
        holds="store",
    ),
    Scenario(name="decode worker", select_targets=decode),
    Scenario(name="prefill worker, queued", select_targets=placed, prompt=_LONG, answer=60, fillers=4),
    Scenario(name="prefill worker, computing", select_targets=computing, prompt=_LONG, answer=60),
    Scenario(name="prefill worker, sending KV", select_targets=transferring, prompt=_LONG, answer=60),
    Scenario(name="prefill worker, handed off", select_targets=handed_off),
    Scenario(name="both store nodes", select_targets=all_named("store"), uses_new_request=True),
    Scenario(name="leading conductor, running stream", select_targets=leading_conductor, cluster=STANDBY),
    Scenario(
        name="leading conductor, new request",
        select_targets=leading_conductor,
        cluster=STANDBY,
        uses_new_request=True,
    ),
    Scenario(name="Redis for 1 s, running stream", select_targets=all_named("redis"), cluster=STANDBY),
    Scenario(
        name="Redis for 1 s, new request", select_targets=all_named("redis"), cluster=STANDBY, uses_new_request=True
    ),
)
STOPS: Sequence[Scenario] = (
    Scenario(name="decode worker", select_targets=decode, number=signal.SIGSTOP),
    Scenario(
        name="prefill worker, computing",
        select_targets=computing,
        number=signal.SIGSTOP,
        prompt=_LONG,
        answer=60,
    ),
    Scenario(name="both store nodes", select_targets=all_named("store"), number=signal.SIGSTOP, uses_new_request=True),
    Scenario(name="conductor, running stream", select_targets=all_named("conductor"), number=signal.SIGSTOP),
    Scenario(
        name="conductor, new request",
        select_targets=all_named("conductor"),
        number=signal.SIGSTOP,
        uses_new_request=True,
    ),
    Scenario(name="gateway", select_targets=all_named("gateway"), number=signal.SIGSTOP),
)
