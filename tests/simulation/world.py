"""Simulated cluster of one seed in virtual time: processes, clients and faults, then calm, then the final checks.

Deterministic: equal seeds give equal worlds if PYTHONHASHSEED is equal, since it sets the order of sets of strings.
"""

import hashlib
import logging
import random
import secrets
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from moonserve.kvstore.node.removal_store import Timestamp
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.protocol.errors import StaleLease
from tests.simulation.clients import FINISHED, Asked
from tests.simulation.disk import Medium
from tests.simulation.faults import Faults
from tests.simulation.loop import OUTSIDE, Life, VirtualLoop
from tests.simulation.network import Network
from tests.simulation.pool_clients import RESERVED_S, PoolClient
from tests.simulation.processes.head import Conductor, Front
from tests.simulation.processes.members import CONDUCTOR, Decode, Prefill
from tests.simulation.processes.process import Process
from tests.simulation.processes.stores import DIRECTORY, DISK_UNITS, PoolDirectory, PoolNode, Store
from tests.simulation.terms import Terms
from tests.simulation.transfer import SimulatedTransfer
from tests.simulation.truth import Truth

NUM_REQUESTS = 7
NUM_NODES, NUM_CLIENTS = 3, 4  # store nodes and clients of a pool
FIRST_ARRIVAL_S = 0.5
SHORT_S, LONG_S = 8.0, 35.0
"""Time until all faults end. In worlds with the long time, cuts and stops outlast keepalive."""
LONG_SHARE = 0.15
# A request that has not ended this long after the last fault counts as hung: every attempt has timed out by then.
HUNG_AFTER_S = 60.0
REJOIN_S = 12.0
PROBE_S = 30.0
LATE_S = 2.0  # until the last duplicates of messages have arrived
SETTLE_S = 40.0  # longer than leases, stream grace and keepalive: a resource still held then is leaked
BOOT_S = 0.2
LOOK_S = 0.2
RESPAWN_S = 0.3  # until the launcher restarts a process that ended itself

_WELL_KNOWN = {"conductor": CONDUCTOR, "directory": DIRECTORY}

log = logging.getLogger()


class World:
    """Cluster of one seed. Call `run` once; afterwards `problems` is empty if all checks passed."""

    def __init__(self, seed: int, *, is_calm: bool = False) -> None:
        """With `is_calm`, no fault is injected."""
        self.rng = random.Random(seed)
        self.problems: list[str] = []
        self.history: list[str] = []  # readable log of events
        self._digest = hashlib.blake2b(digest_size=8)
        self.terms = Terms(seed, self.rng)
        self.loop = VirtualLoop(self.rng, self._loop_problem)
        self.network = Network(self.loop, self.rng)
        self.engines: dict[str, SimulatedTransfer] = {}
        self.processes: dict[str, Process] = {}  # by name: the latest life
        self._zombies: dict[str, list[Life]] = {}
        self._epochs: Counter[str] = Counter()
        self.asked: list[Asked] = []
        self.folder = Path()  # of a pool's disks, while the world runs
        self.truth = Truth(self.loop.time)
        self.is_pool, self.is_calm = self.terms.is_pool, False
        self.num_requests = 0 if self.is_pool else NUM_REQUESTS
        self.kinds = self._kinds()
        self.names = list(self.kinds)
        self.media = {name: Medium(DISK_UNITS * ALIGNMENT) for name in self.names}
        for name in self.names:
            self.start(name)
        is_long = not is_calm and self.rng.random() < LONG_SHARE
        self.calm_at = LONG_S if is_long else SHORT_S
        self.faults = None if is_calm else Faults(self, self.rng, is_long=is_long)
        clients = range(NUM_CLIENTS if self.is_pool else 0)
        self.clients = [PoolClient(self, f"client-{number}") for number in clients]
        for number in range(self.num_requests):
            at = self.rng.uniform(FIRST_ARRIVAL_S, 0.7 * self.calm_at)
            asked = Asked.draw(number, self.rng, self.terms.max_model_len)
            self.loop.call_later(at, self.ask, asked, context=OUTSIDE)

    def _kinds(self) -> dict[str, type[Process]]:
        terms = self.terms
        if self.is_pool:
            nodes = {f"pool-{number}": PoolNode for number in range(NUM_NODES)}
            return {"directory": PoolDirectory, **nodes}
        kinds: dict[str, type[Process]] = {"conductor": Conductor}
        if terms.has_store:
            kinds["store-0"] = Store
        kinds |= {f"prefill-{n}": Prefill for n in range(terms.num_prefill)}
        kinds |= {f"decode-{n}": Decode for n in range(terms.num_decode)}
        return kinds | {f"gateway-{n}": Front for n in range(terms.num_gateways)}

    # -- processes

    def start(self, name: str) -> None:
        """Starts a new life of a process, unless the current one is alive."""
        known = self.processes.get(name)
        if known is not None and known.life.is_alive:
            return
        self._epochs[name] += 1
        life = Life(name, self._epochs[name], self.rng, self.loop)
        # A restarted process often reuses the address of its earlier life, to which messages are still in flight. It
        # does not while a stopped earlier life holds the port.
        is_again = self.rng.random() < 0.5 and not self._zombies.get(name)
        port = 1 if is_again else life.epoch + 1
        address = _WELL_KNOWN.get(name, f"{name}:{port}")
        process = self.processes[name] = self.kinds[name](self, life, address)
        self.note(f"start {life!r} at {address}")
        self.loop.call_later(BOOT_S if life.epoch > 1 else 0.0, self._boot, process, context=OUTSIDE)

    def _boot(self, process: Process) -> None:
        if process.life.is_alive:
            task = process.life.spawn(process.run())
            task.add_done_callback(lambda done: self._ended(process, done), context=OUTSIDE)

    def _ended(self, process: Process, task: Any) -> None:
        """Restarts a process that has ended itself."""
        if task.cancelled() or not process.life.is_alive:
            return
        error = task.exception()
        self.note(f"{process.life!r} ends itself: {error!r}")
        if not isinstance(error, StaleLease):  # raised in a process that has a successor
            self.problem(f"{process.life!r} ended itself: {error!r}")
        self._end(process.life)
        self.loop.call_later(RESPAWN_S, self.start, process.life.name, context=OUTSIDE)

    def crash(self, name: str) -> None:
        self._end(self.processes[name].life)

    def _end(self, life: Life) -> None:
        if life.is_alive:
            life.die()
            self.network.died(life)

    def drain(self, name: str) -> None:
        """Drains a process, as SIGTERM does. Its next life starts when it has drained."""
        process = self.processes[name]
        if process.is_up and process.life.is_alive and not process.is_draining:
            process.is_draining = True
            self.note(f"{process.life!r} drains")
            draining = process.life.spawn(process.drain())
            draining.add_done_callback(lambda done: self._drained(process, done), context=OUTSIDE)

    def _drained(self, process: Process, task: Any) -> None:
        if not process.life.is_alive:
            return
        if not task.cancelled() and task.exception() is not None:
            self.problem(f"{process.life!r} could not drain: {task.exception()!r}")
        self.note(f"{process.life!r} has drained")
        self._end(process.life)
        self.start(process.life.name)

    def lose_disk(self, name: str) -> None:
        process = self.processes[name]
        if isinstance(process, PoolNode) and process.is_up and process.life.is_alive:
            process.life.soon(process.disk.fail)

    def stop(self, name: str) -> None:
        self.processes[name].life.stop()

    def go_on(self, name: str) -> None:
        for life in (*self._zombies.pop(name, ()), self.processes[name].life):
            if life.is_alive and life.is_stopped:
                self.note(f"{life!r} goes on")
                life.go_on()

    def succeed(self, name: str) -> None:
        """Starts another life of a process while the earlier one is stopped."""
        life = self.processes.pop(name).life
        self._zombies.setdefault(name, []).append(life)
        self.start(name)

    # -- clients

    def ask(self, asked: Asked) -> None:
        self.asked.append(asked)
        fronts = [p for p in self.processes.values() if isinstance(p, Front) and p.serves]
        if not fronts:
            asked.asked_at = self.loop.time()
            asked.gateway_died(self.loop)
            return
        front = self.rng.choice(fronts)
        self.note(f"{asked.request_id} asks {front.life!r}: {len(asked.prompt)} + {len(asked.expected)}")
        front.life.ends.append(lambda: asked.gateway_died(self.loop))
        front.life.spawn(asked.run(front, self.loop))

    def pool_nodes(self) -> list[PoolNode]:
        """Returns the pool nodes that have started to serve, including dead ones."""
        return [p for p in self.processes.values() if isinstance(p, PoolNode) and p.is_up]

    # -- phases of a run

    def run(self) -> None:
        with self._watched(), tempfile.TemporaryDirectory(prefix="moonserve-world-") as folder:
            self.folder = Path(folder)
            self.loop.run_until(self.calm_at)
            self._calm()
            self._wait(HUNG_AFTER_S, self._all_ended)
            self._probe()
            self.loop.run_until(self.loop.time() + LATE_S)
            self._wait(SETTLE_S, self._is_quiet)
            self._judge()
        self.loop.close()

    def _calm(self) -> None:
        self.note("calm")
        self.is_calm = True
        if self.faults is not None:
            self.faults.calm()
        for name in self.names:
            self.go_on(name)
            self.start(name)

    def _wait(self, most_s: float, is_done: Callable[[], bool]) -> None:
        ends_at = self.loop.time() + most_s
        while self.loop.time() < ends_at and not is_done():
            self.loop.run_until(self.loop.time() + LOOK_S)

    def _all_ended(self) -> bool:
        have_asked = len(self.asked) >= self.num_requests
        return have_asked and all(asked.outcome for asked in self.asked) and self._clients_ended()

    def _clients_ended(self) -> bool:
        return all(client.task.done() for client in self.clients)

    def _probe(self) -> None:
        """Checks that the cluster serves new requests after the faults."""
        self._wait(REJOIN_S, self._is_complete)
        if self.is_pool:
            # A node that was stopped grants reservations of clients that have given up, once it continues.
            self.loop.run_until(self.loop.time() + RESERVED_S)
            for client in self.clients:
                if not client.task.done():
                    self.problem(f"{client.task!r} hangs")
                client.probe()
            self._wait(PROBE_S, self._clients_ended)
            return
        probes = []
        for number in range(2):
            probe = Asked.draw(1000 + number, self.rng, self.terms.max_model_len)
            probe.leaves_after = None
            probes.append(probe)
            self.ask(probe)
        self._wait(PROBE_S, lambda: all(probe.outcome for probe in probes))
        for probe in probes:
            if probe.outcome != FINISHED:
                self.problem(f"after all is well: {probe.request_id} {probe.outcome} {probe.error}")

    def _is_complete(self) -> bool:
        """Returns True if all processes are up and registered."""
        if not all(process.serves for process in self.processes.values()):
            return False
        if self.is_pool:
            return self._directory().knows(self.pool_nodes())
        conductor = self.processes["conductor"]
        assert isinstance(conductor, Conductor)
        view = conductor.state.cluster(conductor.life.clock())
        present = {each.endpoint.instance_id: each.endpoint.epoch for each in view.instances}
        members = [p.life for p in self.processes.values() if p.role is not None]
        fronts = [p for p in self.processes.values() if isinstance(p, Front)]
        return all(present.get(life.name) == life.epoch for life in members) and all(front.is_ready for front in fronts)

    def _is_quiet(self) -> bool:
        is_quiet = all(p.is_up and not p.unrest() for p in self.processes.values())
        return is_quiet and not (self.is_pool and self._pool_problems())

    def _directory(self) -> PoolDirectory:
        directory = self.processes["directory"]
        assert isinstance(directory, PoolDirectory)
        return directory

    def _pool_problems(self) -> list[str]:
        """Returns differences between the directory and the nodes, and objects that are left after a global removal."""
        nodes = self.pool_nodes()
        removals = [each for node in nodes for each in node.service.removal_store.removals.all()]
        known = {(each.key, each.removal_id) for each in removals}
        left = [f"{n.life!r}: {o}" for n in nodes for o in self.truth.leftovers(known, n.state.catalog.objects())]
        if not self._directory().knows(nodes):
            return [*left, "the directory does not follow all nodes"]
        difference = self._directory().differs_from(nodes)
        return [*left, difference] if difference else left

    def _judge(self) -> None:
        for asked in self.asked:
            if asked.problem:
                self.problem(asked.problem)
            if not asked.outcome:
                self.problem(f"{asked.request_id} hangs")
            elif asked.outcome in ("internal", "deadline", "invalid_request", "incompatible"):
                self.problem(f"{asked.request_id} ended in {asked.error!r}")
            elif self.faults is None and asked.outcome not in (FINISHED, "left"):
                self.problem(f"{asked.request_id} ended in {asked.error!r} though nothing happened")
        for process in self.processes.values():
            if not process.is_up:
                self.problem(f"{process.life!r} is not up")
                continue
            try:
                process.validate()
            except AssertionError as error:
                self.problem(f"{process.life!r}: {error!r}")
            if unrest := process.unrest():
                self.problem(f"{process.life!r} is not quiet: {unrest}")
        for problem in self._pool_problems() if self.is_pool else ():
            self.problem(problem)

    # -- reports

    def note(self, what: str) -> None:
        line = f"{self.loop.time():9.4f} {what}"
        self.history.append(line)
        self._digest.update(line.encode())

    def problem(self, what: str) -> None:
        self.note(f"PROBLEM {what}")
        self.problems.append(what)

    def digest(self) -> str:
        """Returns a digest of all notes and of the outcome of every request. Equal worlds have equal digests."""
        for asked in self.asked:
            self._digest.update(repr((asked.request_id, asked.outcome, asked.ended_at)).encode())
        self._digest.update(repr(sorted(self.outcomes().items())).encode())
        return self._digest.hexdigest()

    def outcomes(self) -> Counter[str]:
        outcomes = Counter(asked.outcome or "hangs" for asked in self.asked)
        return sum((client.outcomes for client in self.clients), outcomes)

    def _loop_problem(self, message: str, error: BaseException | None) -> None:
        if not isinstance(error, StaleLease):  # `_ended` handles it
            self.problem(f"{message}: {error!r}")

    def _stamp(self) -> Timestamp:
        """Returns the current `Timestamp`. All processes of a world are on one machine, which never reboots."""
        now = self.loop.time()
        return Timestamp(boot="simulated", boot_s=now, wall_s=now)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Draws random numbers of the product from the seed, and reports logged errors as problems."""
        listener = _Listener(self)
        log.addHandler(listener)
        try:
            with (
                mock.patch.object(secrets, "token_hex", lambda n: f"{self.rng.getrandbits(8 * n):0{2 * n}x}"),
                mock.patch.object(secrets, "randbits", self.rng.getrandbits),
                mock.patch.object(Timestamp, "now", self._stamp),
            ):
                yield
        finally:
            log.removeHandler(listener)


class _Listener(logging.Handler):
    """Reports errors that the product caught and logged, except injected engine failures, as problems."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and "fell off the bus" not in str(error):
            if isinstance(error, AssertionError):
                self._world.note("".join(traceback.format_exception(error)[-4:]))
            self._world.problem(f"{record.name}: {record.getMessage()}: {error!r}")
