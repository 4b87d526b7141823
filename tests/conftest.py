"""For all tests: nothing is timed by the way. And when several processes run them: their order, and who stands back."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.authority import authority as authority
from tests.thoroughness import THOROUGH, examples

# Steps of niceness: two fifths of the weight, and less than two thirds of that. Not more: beside somebody else's
# processes, which do not stand back, tests would wait for seconds for their turn.
_BACK, _FAR_BACK = 4, 6

_started_with = os.nice(0)

# Otherwise it tells between the dots of connections that ended as tests wanted.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Without a GPU, Triton's kernels are interpreted (tests/engine/cuda). It must be told before triton is imported, and
# transformers imports it, by way of torch.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background job starts with Ctrl-C ignored, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says what else this machine does. Changes are tried with the same examples, so that what
# fails is the change; the thorough run draws others every time.
settings.register_profile(
    "tests",
    max_examples=examples(50),
    derandomize=not THOROUGH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from tests.scheduling import in_order

        items[:] = in_order(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The guest is what takes longest: it goes first and all others stand back for it. Clusters of processes come
    before what only computes: their parts wait for each other. Only root can step forward again."""
    if hasattr(item.config, "workerinput") and "rdma" not in item.keywords:
        from tests.scheduling import CLUSTERS

        back = _BACK if item.nodeid.startswith(CLUSTERS) else _FAR_BACK
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, _started_with + back)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.scheduling import Scheduling

    return Scheduling(config, log)
