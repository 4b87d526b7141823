"""Defines the faults: which processes are hit, at which moment, and which wait of the client counts.

A scene starts a stream, waits for its moment, kills or stops processes, and reports the client's longest wait after
that. It starts on a complete cluster and ends when all processes are back.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.testbed import FaultCluster, Streams, StreamThread, stopped

_BEGUN = 40  # tokens
_LONG, _SHORT = 6_000, 200  # tokens of a prompt
_ANSWER = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """Result of a scene. `waited_s`: longest wait for a token after the fault; `stream_waited_s`: that of the stream
    which ran at the fault, if `waited_s` is a new request's; `wrong`: wrong tokens or ids."""

    waited_s: float
    stream_waited_s: float
    wrong: str = ""
    error: str = ""


TargetSelector = Callable[[Any, StreamThread], Sequence[str]]
"""Waits for the moment of the fault; returns the names of the processes to hit."""


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    strike: Callable[[Any, Sequence[str]], contextlib.AbstractContextManager[None]]
    """Hits the named processes of a cluster, and ends the fault at the end of the block."""
    lasts_s: float = 0.0  # 0 = forever


@contextlib.contextmanager
def _killed(victims: FaultCluster, names: Sequence[str]) -> Iterator[None]:
    victims.kill(names)
    yield


def _stopped(victims: FaultCluster, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    return stopped(victims.processes(names))


KILL = Fault("SIGKILL", _killed)
STOP = Fault("SIGSTOP", _stopped, 20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    select_targets: TargetSelector
    cluster: str = "two of each"
    fault: Fault = KILL
    prompt: int = _SHORT
    answer: int = _ANSWER
    uses_new_request: bool = False  # measures a new request right after the fault
    is_greedy: bool = False  # otherwise every other time
    fillers: int = 0  # number of long prompts queued before it
    holds: str = ""  # prefix of processes stopped from before the request until the fault


def run_scenario(scene: Scenario, victims: Streams, seed: int) -> ScenarioResult:
    """Plays a scene once. `seed` determines prompt and sampling; even seeds decode greedily."""
    prompt = random.Random(f"{scene.name} {seed}").choices(range(16, 4_000), k=scene.prompt)
    temperature = 0.0 if scene.is_greedy else float(seed % 2)
    body: dict[str, Any] = {"prompt": prompt, "seed": seed, "temperature": temperature, "max_tokens": scene.answer}
    expected = victims.whole(body if scene.holds else {**body, "cache_salt": "undisturbed"}).token_ids
    with victims.settled():
        fillers = [victims.ask(filler(f"{scene.name} {seed} {n}")) for n in range(scene.fillers)]
        held = [pid for name, pid in victims.pids().items() if scene.holds and name.startswith(scene.holds)]
        with stopped(held):
            stream = victims.ask(body)
            hit = scene.select_targets(victims, stream)
        at = time.monotonic()
        with scene.fault.strike(victims, hit):
            asked = victims.ask(body) if scene.uses_new_request else stream
            asked.join(timeout=scene.fault.lasts_s or None)
            if scene.fault.lasts_s:
                time.sleep(max(0.0, at + scene.fault.lasts_s - time.monotonic()))
        for each in (stream, asked, *fillers):
            each.join()
    wrong = [_wrong(each, expected) for each in (stream, asked)]
    return ScenarioResult(
        waited_s=asked.longest_gap_s(at),
        stream_waited_s=stream.longest_gap_s(at),
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


def filler(name: str) -> dict[str, Any]:
    prompt = random.Random(name).choices(range(16, 4_000), k=_LONG)
    return {"prompt": prompt, "max_tokens": 2, "temperature": 0}


def decoding(victims: Streams, stream: StreamThread) -> str:
    """Waits until the answer has begun; returns the name of its decode worker."""
    victims.until(lambda: stream.count >= _BEGUN or stream.error)
    return stream.headers["x-decode-instance-id"]


def decode(victims: Streams, stream: StreamThread) -> list[str]:
    return [decoding(victims, stream)]


def handed_off(victims: Streams, stream: StreamThread) -> list[str]:
    decoding(victims, stream)
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
        decoding(victims, stream)
        return [name for name in victims.pids() if name.startswith(prefix)]

    return strike


def leading_conductor(victims: FaultCluster, stream: StreamThread) -> list[str]:
    decoding(victims, stream)
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
    Scenario(name="decode worker", select_targets=decode, fault=STOP),
    Scenario(
        name="prefill worker, computing",
        select_targets=computing,
        fault=STOP,
        prompt=_LONG,
        answer=60,
    ),
    Scenario(name="both store nodes", select_targets=all_named("store"), fault=STOP, uses_new_request=True),
    Scenario(name="conductor, running stream", select_targets=all_named("conductor"), fault=STOP),
    Scenario(
        name="conductor, new request",
        select_targets=all_named("conductor"),
        fault=STOP,
        uses_new_request=True,
    ),
    Scenario(name="gateway", select_targets=all_named("gateway"), fault=STOP),
)
