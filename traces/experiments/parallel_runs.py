"""Runs many simulations of one trace in several processes. Each result is kept on disk and simulated once.

A kept result is found by everything it depends on: the work, the trace, and the source of the packages that produce it.
A change of any of them causes a new simulation. Does not know the purpose of the results.
"""

import functools
import gzip
import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, cast

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TraceRecord, read_trace
from moonserve.traces.output import explain_write_errors
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.results import SimulationResult, results_from_json, results_to_json
from moonserve.traces.simulator.spec import ClusterSpec, CoupledSpec

INTERRUPTED = "what was simulated is kept"
"""Message shown after Ctrl-C."""
_COMPRESSION = 1  # the lowest level: results are read soon and rarely
_DIGEST_BYTES = 16
_ROOT = Path(__file__).parents[2]  # folder of the packages


@functools.cache
def source_digest(module: str) -> str:
    """Returns the digest of a module's source and of all packages that simulations depend on.

    Computed once per process, since imported code no longer changes. Generated code, compiled code and dependencies do
    not count, because results do not depend on their version.
    """
    files = {Path(str(sys.modules[name].__file__)) for name in (module, "moonserve.traces.format")}
    for package in ("conductor", "kvstore", "protocol", "traces/simulator"):
        files |= set((_ROOT / package).rglob("*.py"))
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(files):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A trace identified by its path, so that each process can read it."""

    path: Path
    limit: int | None = None  # number of leading requests; None = all

    def records(self) -> list[TraceRecord]:
        """Returns the records. Raises ConfigError if the file is not a trace."""
        return read_trace(self.path, self.limit)

    def digest(self) -> str:
        """Returns the digest of the file's content and of the limit. Raises ConfigError if it cannot be read."""
        try:
            content = hashlib.blake2b(self.path.read_bytes(), digest_size=_DIGEST_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot read the trace {self.path}: {error.strerror}") from error
        return f"{content.hexdigest()}:{self.limit or 'all'}"


class Job(Protocol):
    """Interface of work: a frozen dataclass that produces a result from a trace."""

    @property
    def cost(self) -> float:
        """Approximate duration, in simulations of a cluster at the trace's speed. Expensive work runs first."""
        ...

    def check(self) -> None:
        """Raises ConfigError if the work cannot be done."""

    def do(self, records: Sequence[TraceRecord]) -> SimulationResult:
        """Produces the result, in any process. Equal work and records give equal results."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """Work that simulates one cluster, with its changes to the trace."""

    spec: ClusterSpec | CoupledSpec
    speedup: float = 1.0  # factor on the trace's clock
    num_outputs: int | None = None  # tokens of every answer; None = as in the trace
    num_requests: int | None = None  # number of leading requests; None = all

    @property
    def cost(self) -> float:
        if isinstance(self.spec, CoupledSpec):
            return 0.1  # measured: a twentieth to a tenth of a cluster with a pool
        return 2.0 if self.spec.policy == "random" else 1.0  # its queues grow long

    def check(self) -> None:
        self.spec.check()

    def do(self, records: Sequence[TraceRecord]) -> SimulationResult:
        return simulate(self.spec, self.records(records))

    def records(self, records: Sequence[TraceRecord]) -> list[TraceRecord]:
        """Returns the records as simulated."""
        scaled = [r.scaled(1.0, 1.0, self.speedup) for r in records[: self.num_requests]]
        if self.num_outputs is None:
            return scaled
        return [replace(record, output_length=self.num_outputs) for record in scaled]


class ResultArchive:
    """A folder of results, with one file per work on one trace."""

    def __init__(self, folder: Path, trace_digest: str) -> None:
        self._folder = folder
        self._trace_digest = trace_digest

    @classmethod
    def of(cls, folder: Path, trace: TraceFile) -> "ResultArchive":
        """Opens an archive. Raises ConfigError if the trace or the folder cannot be used."""
        with explain_write_errors(f"to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, trace.digest())

    def path(self, work: Job) -> Path:
        """Returns the file of this work's result, for the current source code."""
        kind = type(work)
        source = source_digest(kind.__module__)
        identity = [self._trace_digest, source, kind.__name__, asdict(cast("Any", work))]
        text = json.dumps(identity, sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return self._folder / f"{name}.json.gz"

    def read(self, work: Job) -> SimulationResult:
        """Returns the result of a work. Raises ConfigError if it is missing or damaged."""
        path = self.path(work)
        try:
            (result,) = results_from_json(gzip.decompress(path.read_bytes()).decode())
        except (OSError, EOFError, ValueError, zlib.error, ConfigError) as error:
            raise ConfigError(f"cannot read {path}: {error}; delete it and try again") from error
        return result


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Overall progress after one work is done."""

    work: Job
    took_s: float
    num_done: int
    num_all: int
    share_done: float  # by the costs of the works
    left_s: float  # estimated from the work done so far


def run_missing(
    works: Iterable[Job],
    trace: TraceFile,
    archive: ResultArchive,
    *,
    num_processes: int,
    tell: Callable[[JobProgress], None],
) -> None:
    """Does all work whose result is not in the archive. Raises ConfigError for work that cannot be done."""
    wanted = [work for work in dict.fromkeys(works) if not archive.path(work).is_file()]
    for work in wanted:
        work.check()
    wanted.sort(key=lambda work: -work.cost)
    began, finished = time.perf_counter(), 0.0
    total = sum(work.cost for work in wanted)
    for done, (work, took_s) in enumerate(_results(wanted, trace, archive, num_processes), 1):
        finished += work.cost
        left_s = (time.perf_counter() - began) * (total / finished - 1)
        tell(JobProgress(work, took_s, done, len(wanted), finished / total, left_s))


def _results(
    works: Sequence[Job], trace: TraceFile, archive: ResultArchive, num_processes: int
) -> Iterator[tuple[Job, float]]:
    jobs = [(work, archive.path(work)) for work in works]
    if num_processes == 1 or len(works) <= 1:
        yield from ((work, _run_job(work, trace, path)) for work, path in jobs)
        return
    # Spawned, not forked: the caller may have threads.
    with ProcessPoolExecutor(min(num_processes, len(jobs)), get_context("spawn")) as pool:
        tasks = {pool.submit(_run_job, work, trace, path): work for work, path in jobs}
        try:
            for task in as_completed(tasks):
                yield tasks[task], task.result()
        except BaseException:  # includes Ctrl-C; work not yet started is dropped
            pool.shutdown(cancel_futures=True)
            raise


def _run_job(work: Job, trace: TraceFile, path: Path) -> float:
    """Does one work, in any process. Returns the seconds taken. Raises ConfigError, also if the disk is full."""
    began = time.perf_counter()
    text = results_to_json([work.do(_records(trace))])
    partial = path.with_suffix(f".{os.getpid()}")  # written atomically: other processes may read it or do the same
    try:
        partial.write_bytes(gzip.compress(text.encode(), _COMPRESSION, mtime=0))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return time.perf_counter() - began


@functools.lru_cache(maxsize=1)
def _records(trace: TraceFile) -> list[TraceRecord]:
    """Returns the records, read once per process."""
    return trace.records()
