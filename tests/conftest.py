"""Configuration of all tests: assignment to `make test` or `make test-all`, order, and number of examples."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from moonserve.__main__ import main
from moonserve.protocol.process import lifecycle
from tests.authority import authority as authority
from tests.commands import Command
from tests.redis_server import redis as redis
from tests.thoroughness import THOROUGH, examples

SLOW = (
    "benchmarks/",
    "conductor/peers/test_leader_election_service.py",
    "deploy/admin/",
    "deploy/diagnostics/test_profile.py",
    "deploy/ray/test_ray.py",
    "deploy/test_monitoring.py",
    "deploy/test_wheel.py",
    "docs/",
    "e2e/",
    "engine/cuda/",
    "engine/kv_cache/test_elastic_service.py",
    "engine/kv_cache/test_kv_dtypes.py",
    "kvstore/client/test_faults.py",
    "kvstore/disk/test_power.py",
    "kvstore/faults/",
    "networks/",
    "prefill_worker/test_pipeline.py",
    "rdma/",
    "simulation/",
    "traces/reports/test_page.py",
    "traces/simulator/test_fairness.py",
    "traces/simulator/test_trace.py",
    "transfer/fuzz/",
    "transfer/paths/test_failover.py",
)
"""Tests that only `make test-all` runs, like those marked `slow`: several processes, other programs, virtual hours."""

PROGRAMS = {"redis", "redis_server", "clang", "clang++"}
"""Fixtures and parameters of tests that need a program which a new machine lacks. `make test-all` runs them too."""

FAST = ("e2e/test_cluster.py", "engine/cuda/test_device.py")
"""Exceptions to SLOW, which `make test` runs."""

LONGEST = ("rdma/", "deploy/ray/", "e2e/test_parity.py", "e2e/test_cluster.py", "kvstore/faults/", "traces/", "e2e/")
"""Tests that run first, so that no long test remains when all others have ended."""

gc.disable()  # until all tests are collected: their modules stay alive

collect_ignore_glob = [] if find_spec("vllm") else ["vllm/*"]  # its tests import vLLM: make test-vllm

# Without this, gRPC logs each connection that a test ends on purpose between pytest's dots.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Without a GPU, Triton's kernels are interpreted (tests/engine/cuda). The variable must be set before triton is
# imported, and transformers imports it by way of torch.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job starts with Ctrl-C ignored, and the commands that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the time of an example depends on the load of the machine. Changes are tested with the same examples, so
# that a failure is due to the change. The thorough run draws new examples every time.
settings.register_profile(
    "tests",
    max_examples=examples(50),
    derandomize=not THOROUGH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = _place(item)
        params = getattr(getattr(item, "callspec", None), "params", {})
        needs_program = not PROGRAMS.isdisjoint((*getattr(item, "fixturenames", ()), *map(str, params.values())))
        if (place.startswith(SLOW) and not place.startswith(FAST)) or needs_program:
            item.add_marker(pytest.mark.slow)
        if place.startswith("vllm/"):
            item.add_marker(pytest.mark.vllm)
        counts_examples = getattr(getattr(item, "module", None), "examples", None) is examples
        if is_hypothesis_test(getattr(item, "obj", None)) or counts_examples:
            item.add_marker(pytest.mark.examples)
    items.sort(key=_rank)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _place(item: pytest.Item) -> str:
    return item.path.relative_to(_HERE).as_posix()


def _rank(item: pytest.Item) -> int:
    place = _place(item)
    return next((i for i, begin in enumerate(LONGEST) if place.startswith(begin)), len(LONGEST))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Llama checkpoint, which no test may change."""
    from tests.random_models import make_model  # imported here because it imports transformers

    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


@pytest.fixture(scope="module")
def own_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Llama checkpoint of a module, with its MODEL: fields of the configuration."""
    from tests.random_models import make_model

    path = tmp_path_factory.mktemp("model")
    make_model("llama", path, **request.module.MODEL)
    return path


@pytest.fixture
def moonserve(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `moonserve` in this process."""
    return Command(capsys, main)


@pytest.fixture
def untouched() -> Iterator[None]:
    """Restores the root logger and the handlers of signals after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    root.handlers[:], root.level = handlers, level
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _services_collect_no_garbage() -> Iterator[None]:
    """Disables the garbage collection at a service's start: 0.3 s each in a test process, whose heap is large."""
    patch = pytest.MonkeyPatch()
    real = {name: getattr(gc, name) for name in ("get_threshold", "set_threshold", "enable", "disable")}
    nothing = dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: 0)
    patch.setattr(lifecycle, "gc", SimpleNamespace(**real, **nothing))
    yield
    patch.undo()
