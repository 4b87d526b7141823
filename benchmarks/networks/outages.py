"""Measures the results of clients while hosts cannot reach each other, and the time until they are served again.

Its rule: right answers are known in advance, from the same cluster without an outage. Each request has a unique salt,
so that its KV is really transferred between hosts.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.networks.cluster import DECODE, FRONT, PREFILL, Answer, HostsCluster
from benchmarks.networks.hosts import Link, Network

MAX_TOKENS = 12
_PROMPTS = tuple(
    f"def function_{number}(values):\n    total = {number}\n    for value in values:\n" * 3 for number in range(8)
)
_EVERY_S = 0.4
_CLIENT_S = 40.0
_STEADY = 5
"""Number of consecutive right answers, in order of request, that count as recovered service."""
_GIVE_UP_S = 60.0

_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Outage:
    title: str
    begin: Callable[[Network], None]
    end: Callable[[Network], None]


def _isolated(title: str, host: int) -> Outage:
    return Outage(title, lambda net: net.isolate(host), lambda net: net.rejoin(host))


def _one_way(title: str, source: int, target: int) -> Outage:
    return Outage(title, lambda net: net.cut(source, target), lambda net: net.heal(source, target))


OUTAGES = (
    _isolated("the prefill host is cut off", PREFILL),
    _isolated("the decode host is cut off", DECODE),
    _isolated("the front (conductor, gateway) is cut off", FRONT),
    _one_way("one way: nothing from the prefill host to the decode host", PREFILL, DECODE),
    _one_way("one way: nothing from the decode host to the prefill host", DECODE, PREFILL),
    _one_way("one way: nothing from the decode host to the front", DECODE, FRONT),
    _one_way("one way: nothing from the front to the prefill host", FRONT, PREFILL),
)

DEGRADED = (
    ("20 ms, 1 % lost, 100 Mbit", Link(delay_s=0.01, loss=0.01, bytes_per_s=12.5e6)),
    ("20 ms, 5 % lost, 100 Mbit", Link(delay_s=0.01, loss=0.05, bytes_per_s=12.5e6)),
    ("100 ms, 2 % lost", Link(delay_s=0.05, loss=0.02)),
)


@dataclass(slots=True)
class Report:
    """Result of one outage. `outcomes` and `longest_s` cover the requests that began during it."""

    title: str
    outcomes: Counter[str] = field(default_factory=Counter)
    """right, wrong, refused (an HTTP error with its reason), cut (no complete answer within the client's timeout)."""
    longest_s: float = 0.0
    recovered_s: float = 0.0
    """Time from the end of the outage to the first of `_STEADY` consecutive right answers."""


def known_answers(cluster: HostsCluster) -> Mapping[str, str]:
    """Returns the right answer to each prompt, without an outage. Raises RuntimeError if the cluster fails."""
    return {prompt: _undisturbed_answer(cluster, prompt) for prompt in _PROMPTS}


def _undisturbed_answer(cluster: HostsCluster, prompt: str) -> str:
    answer = _ask(cluster, prompt)
    if answer.text is None:
        raise RuntimeError(f"no answer although nothing is wrong: {answer.problem}")
    return answer.text


def run_outage(cluster: HostsCluster, outage: Outage, known: Mapping[str, str], seconds: float) -> Report:
    """Runs an outage of `seconds`, with requests during and after it. Raises RuntimeError if it does not recover."""
    report = Report(outage.title)
    outage.begin(cluster.net)
    try:
        during = _RequestLoop(cluster, known)
        time.sleep(seconds)
    finally:
        outage.end(cluster.net)
    healed_at = time.monotonic()
    during.stop()
    report.recovered_s = _recovered_at(cluster, known) - healed_at
    for answer, verdict in during.outcomes():
        report.outcomes[verdict] += 1
        report.longest_s = max(report.longest_s, answer.seconds)
    return report


def verdict_of(answer: Answer, right: str) -> str:
    """Returns the verdict on an answer: right, wrong, refused or cut."""
    if answer.text is not None:
        return "right" if answer.text == right else "wrong"
    return "refused" if answer.status else "cut"


class _RequestLoop:
    """Sends requests at intervals, each from its own thread, until stopped."""

    def __init__(self, cluster: HostsCluster, known: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._known = known
        self._stopping = threading.Event()
        self._answers: list[tuple[str, Answer]] = []
        self._threads: list[threading.Thread] = []
        self._asker = threading.Thread(target=self._run)
        self._asker.start()

    def stop(self) -> None:
        self._stopping.set()
        self._asker.join()

    def outcomes(self) -> Iterator[tuple[Answer, str]]:
        """Yields the answer and verdict of every request, after all have ended."""
        for thread in self._threads:
            thread.join()
        for prompt, answer in self._answers:
            yield answer, verdict_of(answer, self._known[prompt])

    def _run(self) -> None:
        for prompt in itertools.cycle(self._known):
            thread = threading.Thread(target=self._one, args=[prompt])
            thread.start()
            self._threads.append(thread)
            if self._stopping.wait(_EVERY_S):
                return

    def _one(self, prompt: str) -> None:
        self._answers.append((prompt, _ask(self._cluster, prompt)))


def _recovered_at(cluster: HostsCluster, known: Mapping[str, str]) -> float:
    """Returns the time of the first of `_STEADY` consecutive right answers. Raises RuntimeError on a wrong one."""
    give_up_at = time.monotonic() + _GIVE_UP_S
    in_a_row: list[float] = []
    for prompt in itertools.cycle(known):
        answer = _ask(cluster, prompt)
        verdict = verdict_of(answer, known[prompt])
        if verdict == "wrong":
            raise RuntimeError(f"a wrong answer after the outage: {answer.text!r}")
        in_a_row = [*in_a_row, time.monotonic()] if verdict == "right" else []
        if len(in_a_row) == _STEADY:
            return in_a_row[0]
        if time.monotonic() > give_up_at:
            break
        if verdict != "right":
            time.sleep(0.1)
    raise RuntimeError(f"not served again within {_GIVE_UP_S:.0f} s: {answer.problem}")


def degraded(
    cluster: HostsCluster, link: Link, known: Mapping[str, str], prompts: Sequence[str] = _PROMPTS
) -> Counter[str]:
    """Counts the verdicts on consecutive requests while every host sends through `link`."""
    hosts = (FRONT, PREFILL, DECODE)
    for host in hosts:
        cluster.net.shape(host, link)
    try:
        return Counter(verdict_of(_ask(cluster, prompt), known[prompt]) for prompt in prompts)
    finally:
        for host in hosts:
            cluster.net.shape(host, Link())


def _ask(cluster: HostsCluster, prompt: str) -> Answer:
    salt = f"outage-{next(_salts)}"
    return cluster.ask(prompt, max_tokens=MAX_TOKENS, timeout_s=_CLIENT_S, salt=salt)
