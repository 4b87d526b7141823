"""Faults of clusters with `--engine vllm`: which processes, bytes or links are hit, and at which moment.

Each play measures two requests with the same prompt: a stream that runs at the fault, and a new one right after it.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.faults.flipped_bytes import flip_bytes
from benchmarks.faults.scenarios import KILL, STOP, Fault, Scenario, all_named, decode, handed_off
from benchmarks.faults.testbed import FaultCluster, Streams, StreamThread
from benchmarks.faults.vllm_hosts import DECODE_HOSTS, STORE, VllmHosts, vllm_hosts
from benchmarks.networks.cluster import PREFILL

_START_S = 400.0
_DRAM = 32 << 20
_NUM_FLIPPED = 1_000
_NUM_FILLERS = 3
_STORED_PROMPT = 2_000  # tokens: 12 MB of KV, in the store
_LONG_PROMPT = 4_000

ONE, TWO, STORED, HOSTS = (
    "one of each",
    "two of each",
    "one of each, no prefix caches",
    "one prefill worker, two decode workers, five hosts",
)
_ENGINE = (
    *("--dtype", "float32", "--vllm.enforce-eager", "--vllm.block-size", "32"),
    *("--vllm.max-num-seqs", "16", "--vllm.max-num-batched-tokens", "2048"),
)
_NO_CACHE = "--vllm.no-enable-prefix-caching"
_FLAGS: Mapping[str, Sequence[str]] = {
    ONE: (),
    TWO: ("--prefill-workers", "2", "--decode-workers", "2"),
    STORED: ("--dram", str(_DRAM), _NO_CACHE),
}


@contextlib.contextmanager
def vllm_cluster(cluster: str, python: str, log_dir: Path) -> Iterator[Streams]:
    if cluster == HOSTS:
        with vllm_hosts(log_dir, python, (*_ENGINE, _NO_CACHE)) as hosts:
            yield hosts
        return
    flags = ("--engine", "vllm", "--vllm-python", python, *_FLAGS[cluster], *_ENGINE)
    victims = FaultCluster(*flags, log_dir=log_dir)
    try:
        victims.wait_until_ready(_START_S)
        yield victims
    finally:
        victims.stop(60.0)


# Moments


def _computing(victims: FaultCluster, stream: StreamThread) -> list[str]:
    """Strikes the prefill worker half a second after it has begun to compute a long prompt."""
    victims.until(lambda: victims.prefill_of(stream) or stream.error)
    name = victims.prefill_of(stream)
    victims.until(lambda: victims.load(name).queued_tokens or stream.count)
    time.sleep(0.5)
    return [name]


def _stored(victims: Streams, stream: StreamThread) -> list[str]:
    """Strikes the store once prompts are loaded from it, in the middle of the stream."""
    decode(victims, stream)
    probe = {**stream.body, "max_tokens": 1}
    victims.until(lambda: victims.whole(probe).num_cached > 0.9 * _STORED_PROMPT)
    return [name for name in victims.pids() if name.startswith("store")]


def _overfilled(victims: Streams, stream: StreamThread) -> list[str]:
    """Stores more than the store holds, beside the stream."""
    decode(victims, stream)
    for number in range(_NUM_FILLERS):
        victims.whole({**stream.body, "max_tokens": 1, "cache_salt": f"filler {number}"})
    return []


# Faults


@contextlib.contextmanager
def _flipped(victims: FaultCluster, names: Sequence[str]) -> Iterator[None]:
    offsets = [number * (_DRAM // _NUM_FLIPPED) for number in range(_NUM_FLIPPED)]
    for name in names:
        flip_bytes(victims.pids()[name], offsets, _DRAM)
    yield


def _cut_from_decode_worker(victims: VllmHosts, names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Cuts the prefill worker from the stream's decode worker, which is also chosen for the next request."""
    return victims.cut(*((PREFILL, DECODE_HOSTS[name]) for name in names))


def _cut_from_store(victims: VllmHosts, _names: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    return victims.cut(*((host, STORE) for host in (PREFILL, *DECODE_HOSTS.values())))


_FLIPS = Fault("1,000 flipped bytes", _flipped)
_TOO_MUCH = Fault("more stored than fits", lambda *_: contextlib.nullcontext())
_PARTITION = "partition, 30 s"

_scene = partial(Scenario, uses_new_request=True, is_greedy=True)
_long = partial(_scene, prompt=_LONG_PROMPT, answer=60)
_from_store = partial(_scene, select_targets=_stored, prompt=_STORED_PROMPT, cluster=STORED)
SCENES: Sequence[Scenario] = (
    _from_store(name="store node", fault=_FLIPS),
    _from_store(name="store node", fault=_TOO_MUCH, select_targets=_overfilled),
    _from_store(name="store node", fault=KILL),
    _from_store(name="store node", fault=STOP),
    _scene(name="decode worker", select_targets=decode),
    _scene(name="decode worker", select_targets=decode, fault=STOP),
    _scene(name="prefill worker, after the handoff", select_targets=handed_off),
    _long(name="prefill worker, computing the prompt", select_targets=_computing),
    _long(name="prefill worker, computing the prompt", select_targets=_computing, fault=STOP),
    _scene(name="conductor", select_targets=all_named("conductor")),
    _scene(name="conductor", select_targets=all_named("conductor"), fault=STOP),
    _scene(name="the only decode worker", select_targets=decode, cluster=ONE),
    _scene(
        name="between prefill and a decode worker",
        select_targets=decode,
        fault=Fault(_PARTITION, _cut_from_decode_worker, 30.0),
        cluster=HOSTS,
    ),
    _from_store(name="between workers and store node", fault=Fault(_PARTITION, _cut_from_store, 30.0), cluster=HOSTS),
)
