"""Workers that share a memory budget: the share of each, and the effect of dead, stopped and greedy processes."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonserve.engine.kv_cache.elastic_budget import EMPTY_TTL_S, WANTED_TTL_S, Budget, Ledger, WorkerShare
from moonserve.engine.kv_cache.elastic_service import SharedPageSupply
from moonserve.protocol.errors import ConfigError
from tests.clock import Clock
from tests.kvstore.faults.mounts import mounted
from tests.thoroughness import any_order

MIB = 1 << 20
BUDGET = 16 * MIB

IMPORTS = """
import os, signal, sys
from pathlib import Path
from moonserve.engine.kv_cache.elastic_budget import Ledger
"""

# Takes memory by the MiB until none is left, prints the amount, and waits to be killed.
GREEDY = """
ledger = Ledger(Path(sys.argv[1]), budget=16 << 20)
row = ledger.claim(sys.argv[2], 0, 1 << 40)
total = 0
while sum(each.held for each in ledger.rows()) < 16 << 20:  # the lock may be too busy at times
    total += ledger.take(row, 1, 1 << 20)
print(total, flush=True)
sys.stdin.read()
"""

# Stops itself while it holds the lock.
STOPPED = """
ledger = Ledger(Path(sys.argv[1]), budget=16 << 20)
with ledger._locked():
    print("locked", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
print("gone on", flush=True)
"""

# Is killed just before it makes the given system call on a new file.
KILLED = """
setattr(os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
Ledger(Path(sys.argv[1]), budget=16 << 20)
"""


@contextlib.contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command, pipe = [sys.executable, "-c", IMPORTS + program, *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shares"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    made = Ledger(path, budget=BUDGET)
    yield made
    made.close()


@pytest.fixture
def make_supply(path: Path) -> Iterator[Callable[..., SharedPageSupply]]:
    """Makes seats that the kernel's locks treat like seats of other processes."""
    made: list[SharedPageSupply] = []

    def make(name: str, floor: int = 0, clock: Clock | None = None) -> SharedPageSupply:
        ledger = Ledger(path, budget=BUDGET, clock=clock or Clock())
        try:
            made.append(SharedPageSupply(ledger, name, page_bytes=MIB, floor=floor, ceiling=BUDGET))
        except ConfigError:
            ledger.close()
            raise
        return made[-1]

    yield make
    for each in made:
        each.close()


class Host(RuleBasedStateMachine):
    """Workers take, use, request and give memory, and the budget changes. In the end all wait for their maximum."""

    @initialize(
        nbytes=st.integers(1, 30),
        floors=st.lists(st.integers(0, 6), min_size=2, max_size=4),
        ceilings=st.lists(st.integers(0, 30), min_size=4, max_size=4),
    )
    def begin(self, nbytes: int, floors: list[int], ceilings: list[int]) -> None:
        pairs = zip(floors, ceilings, strict=False)
        self.shares = [WorkerShare(floor=floor, ceiling=floor + more) for floor, more in pairs]
        self.budget = Budget(sum(floors) + nbytes, self.shares)
        self.used = [0] * len(self.shares)

    @rule(number=st.integers(0, 3), count=st.integers(1, 30))
    def take(self, number: int, count: int) -> None:
        number %= len(self.shares)
        share, budget = self.shares[number], self.budget
        others = [each for each in self.shares if each is not share]
        outdone = any(budget.missing_bytes(each) and each.held < share.held for each in others)
        before, free = share.held, budget.free
        taken = min(count, budget.free_bytes_for(share))
        share.held += taken
        share.wanted = max(0, share.wanted - taken)
        assert taken <= max(0, free), "what nobody has cannot be taken"
        if taken:
            assert share.held <= share.ceiling
            if share.held > share.floor:
                owed = sum(each.unmet for each in others)
                assert budget.free >= owed, "others' floors are out of reach"
                assert not outdone, "one that waits has less"
        elif before < share.floor:
            assert free <= 0, "a floor is refused"
        self.tell()

    @rule(number=st.integers(0, 3), used=st.integers(0, 30), wanted=st.integers(0, 30))
    def use(self, number: int, used: int, wanted: int) -> None:
        number %= len(self.shares)
        self.used[number] = min(used, self.shares[number].held)
        self.shares[number].wanted = wanted
        self.tell()

    @rule(number=st.integers(0, 3))
    def give(self, number: int) -> None:
        """Gives back what is requested. Memory in use is never given back."""
        number %= len(self.shares)
        share = self.shares[number]
        share.held -= min(self.budget.bytes_requested(share), share.held - self.used[number])
        self.tell()

    @rule(more=st.integers(0, 30))
    def resize(self, more: int) -> None:
        self.budget.nbytes = max(1, sum(each.floor for each in self.shares) + more)

    def tell(self) -> None:
        for share, used in zip(self.shares, self.used, strict=True):
            share.empty = share.held - used

    @invariant()
    def figures_keep_to_their_bounds(self) -> None:
        for share in getattr(self, "shares", ()):
            budget = self.budget
            most = max(0, share.ceiling - share.held)
            assert 0 <= budget.free_bytes_for(share) <= budget.available_bytes(share) <= most
            others = [each for each in self.shares if each is not share]
            floors = sum(each.floor for each in others)
            assert share.floor <= budget.max_bytes(share) <= min(share.ceiling, budget.nbytes - floors)
            above = sum(max(0, each.held - each.floor) for each in others)
            assert budget.available_bytes(share) <= max(0, budget.free + above), "beyond what others can give"
            assert 0 <= budget.bytes_requested(share) <= max(0, share.held - share.floor)
            assert budget.bytes_requested(share) >= min(-budget.free, share.held - share.floor)
            within_reach = max(0, budget.max_bytes(share) - share.held)
            assert budget.missing_bytes(share) <= min(share.wanted, within_reach)

    def teardown(self) -> None:
        """No worker starves: if all wait and use nothing, the one with the least gets more once the others gave."""
        if not hasattr(self, "shares"):
            return
        self.used = [0] * len(self.shares)
        for share in self.shares:
            share.wanted = share.ceiling
        self.tell()
        waiting = [share for share in self.shares if self.budget.missing_bytes(share)]
        for _ in range(10):
            for number in range(len(self.shares)):
                self.give(number)
        assert self.budget.free >= 0
        if waiting:
            least = min(waiting, key=lambda each: each.held)
            others = [each for each in self.shares if each is not least]
            assert self.budget.free_bytes_for(least) or all(
                each.held <= max(each.floor, least.held + 1) for each in others
            )


TestHost = any_order(Host, 100, 30)


def test_concurrent_processes_never_exceed_the_budget_and_dead_ones_hold_nothing(path: Path, ledger: Ledger) -> None:
    row = ledger.claim("survivor", 0, BUDGET)
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(running(GREEDY, str(path), f"worker-{i}")) for i in range(3)]
        assert sum(int(says(process)) for process in greedy) == 16
        assert sum(each.held for each in ledger.rows()) == BUDGET
        assert ledger.take(row, 1, MIB) == 0
    assert ledger.take(row, 99, MIB) == 16
    assert [each.name for each in ledger.rows()] == ["survivor"]


def test_process_stopped_inside_the_lock_does_not_block_others(path: Path, ledger: Ledger) -> None:
    row = ledger.claim("worker", 0, BUDGET)
    assert ledger.take(row, 2, MIB) == 2
    with running(STOPPED, str(path)) as stopped:
        assert says(stopped) == "locked"
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)  # a SIGCONT sent before the stop would be lost
        assert ledger.take(row, 1, MIB) == 0  # does not block
        ledger.give(row, MIB)
        os.kill(stopped.pid, signal.SIGCONT)
        assert says(stopped) == "gone on"
        assert ledger.take(row, 1, MIB) == 1


def test_starting_process_waits_for_the_lock(path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a ledger and claiming a row wait for a held lock, longer than `take` does."""
    late: list[Ledger] = []
    for begin in (lambda: late.append(Ledger(path, budget=BUDGET)), lambda: late[0].claim("late", 0, BUDGET)):
        held, pauses = contextlib.ExitStack(), itertools.count(1)
        assert held.enter_context(ledger._locked())

        def pause(_: float, held: Any = held, pauses: Any = pauses) -> None:
            if next(pauses) == 1000:
                held.close()

        with monkeypatch.context() as patched:
            patched.setattr("moonserve.engine.kv_cache.elastic_budget.time.sleep", pause)
            begin()
    assert late[0].take(0, 1, MIB) == 1
    late[0].close()


def test_waiting_worker_gets_spare_pages_of_another_but_no_used_pages(
    make_supply: Callable[..., SharedPageSupply],
) -> None:
    """A waiting worker gets the memory that another can spare, not what it uses. Each rings the other's bell."""
    idle, busy = make_supply("idle"), make_supply("busy")
    assert idle.take(16) == 16
    idle.report_spare(6)
    assert busy.num_available() == 6
    assert busy.take(1) == 0
    busy.report_wanted(9)
    assert idle.bell.recv(1) == b"!"
    idle.refresh()
    assert idle.pages_requested() == 9  # its pool gives back only pages in which nothing is held
    idle.give(6)
    assert busy.bell.recv(1) == b"!"
    assert busy.take(9) == 6


def test_reports_of_a_silent_process_expire(make_supply: Callable[..., SharedPageSupply]) -> None:
    clock = Clock()
    one, other = make_supply("one", clock=clock), make_supply("other", clock=clock)
    assert one.take(16) == 16
    one.report_spare(16)
    other.report_wanted(3)
    one.refresh()
    assert (one.pages_requested(), other.num_available()) == (3, 16)
    clock.now += WANTED_TTL_S
    one.refresh()
    assert (one.pages_requested(), other.num_available()) == (0, 16)
    clock.now += EMPTY_TTL_S - WANTED_TTL_S
    assert other.num_available() == 0


def test_smaller_budget_is_requested_back_and_larger_one_can_be_taken(
    make_supply: Callable[..., SharedPageSupply],
) -> None:
    worker = make_supply("worker", floor=2 * MIB)
    assert worker.take(16) == 16
    worker.resize(10 * MIB)
    assert worker.pages_requested() == 6
    worker.resize(20 * MIB)
    assert worker.pages_requested() == 0
    with pytest.raises(ConfigError, match="floors"):
        worker.resize(MIB)
    with pytest.raises(ConfigError, match="all floors together"):
        make_supply("another", floor=19 * MIB)
    worker.limit(0, 32 * MIB)
    assert worker.take(99) == 4


def test_restarted_worker_gets_a_row_and_keeps_the_budget_of_living_workers(path: Path, ledger: Ledger) -> None:
    ledger.claim("stays", 0, BUDGET)
    again = Ledger(path, budget=1)
    assert again.budget == BUDGET
    again.close()
    ledger.close()
    alone = Ledger(path, budget=7)
    assert alone.budget == 7
    alone.close()
    ledger.__init__(path, budget=7)  # type: ignore[misc] # so that the fixture can close it


def test_file_of_another_format_is_refused(path: Path) -> None:
    path.write_bytes(b"x" * 100_000)
    with pytest.raises(ConfigError, match="not a ledger of KV memory"):
        Ledger(path, budget=BUDGET)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_half_initialised_file_is_initialised_by_the_next_process(path: Path, call: str) -> None:
    with running(KILLED, str(path), call) as killed:
        assert killed.wait() == -signal.SIGKILL
    ledger = Ledger(path, budget=BUDGET)
    assert ledger.budget == BUDGET
    ledger.close()


def test_file_on_a_full_disk_is_refused_at_once(tmp_path: Path) -> None:
    """A full disk is reported when the ledger is made, not by SIGBUS when a share is taken."""
    with mounted(tmp_path / "disk", 4096) as disk:
        (disk / "filler").write_bytes(bytes(4096))
        with pytest.raises(ConfigError, match="No space left"):
            Ledger(disk / "ledger", budget=BUDGET)


def test_worker_with_available_bytes_can_take_a_page(make_supply: Callable[..., SharedPageSupply]) -> None:
    """A worker with room can get a page even if floors are not whole pages: fractions of pages are not added up."""
    wanting, *others = make_supply("a"), make_supply("b", 5 * MIB // 2), make_supply("c", 5 * MIB // 2)
    for other in others:
        assert other.take(3) == 3
        other.report_spare(3)
    assert wanting.take(99) == 10
    wanting.report_wanted(1)
    assert wanting.num_available() == 2
    for other in others:
        other.refresh()
        assert other.pages_requested() == 1
    others[0].give(1)
    assert wanting.take(1) == 1


class _Looking:
    """Number of bytes whose conversion to int lets another worker take memory at that moment."""

    def __init__(self, nbytes: int, ledger: Ledger, row: int) -> None:
        self._nbytes, self._ledger, self._row = nbytes, ledger, row

    def __rsub__(self, held: int) -> "_Looking":
        return _Looking(held - self._nbytes, self._ledger, self._row)

    def __index__(self) -> int:
        self.taken = self._ledger.take(self._row, 99, MIB)
        return self._nbytes


def test_readers_never_see_less_than_is_held_while_pages_are_given_back(path: Path, ledger: Ledger) -> None:
    """While memory is given back, no other worker can take too much, although giving does not need the lock."""
    other = Ledger(path, budget=BUDGET)
    giving, taking = ledger.claim("giving", 0, BUDGET), other.claim("taking", 0, BUDGET)
    assert ledger.take(giving, 16, MIB) == 16
    ledger.give(giving, _Looking(MIB, other, taking))  # type: ignore[arg-type]
    other.take(taking, 99, MIB)
    assert sum(row.held for row in ledger.rows()) == BUDGET
    other.close()


def test_inconsistent_floors_are_tolerated_while_they_change() -> None:
    """Rows are read without the lock, so floors seen during a move may exceed the budget. This must not fail."""
    shares = [WorkerShare(floor=floor, ceiling=16) for floor in (12, 12, 0)]
    budget = Budget(16, shares)
    assert [budget.available_bytes(each) >= 0 for each in shares] == [True] * 3
    assert budget.max_bytes(shares[2]) < 0
