"""Runs tests/rdma/inside once in the guest, and shows its output as it arrives."""

import sys
from pathlib import Path

import pytest

from tests.rdma.expected import Expected
from tests.rdma.guest.machine import REPOSITORY, run, why_unavailable
from tests.thoroughness import THOROUGH

INSIDE = (Path(__file__).parent / "inside").relative_to(REPOSITORY)
CLUSTER = INSIDE / "test_cluster.py"
"""Takes minutes, since emulated processors need one to import torch. Runs only if the guest is explicitly selected."""
GUEST_TIMEOUT_S = 1_200.0
"""A run with the cluster test took 264 s alone on the machine and 984 s next to all other tests."""
# Loads only the plugins that the tests need: a second of imports on the host takes twenty in the guest.
PYTEST = (
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -p pytest_timeout -p pytest_asyncio.plugin "
    f"-v --durations=10 -p no:cacheprovider --confcutdir {INSIDE} {INSIDE}"
)
BRIEF = "not many_threads and not callbacks and not several_peers and not its_own_error"
"""Skips tests of code above the devices, which tests/transfer covers with in-memory devices."""
UNAVAILABLE = why_unavailable()


@pytest.mark.rdma
@pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no guest with Soft-RoCE: {UNAVAILABLE}")
@pytest.mark.timeout(GUEST_TIMEOUT_S + 60)
def test_the_rdma_tests_pass_in_the_guest(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    if THOROUGH or pytestconfig.option.markexpr == "rdma":
        Expected.compute().write(tmp_path)
        command = PYTEST
    else:
        command = f"{PYTEST} --ignore {CLUSTER} -k '{BRIEF}'"
    assert run(command, tmp_path, GUEST_TIMEOUT_S, say) == 0
    assert "SKIPPED" not in "".join(said)
