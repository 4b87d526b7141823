"""The rdma transport fulfils the contract of all transports on real queue pairs, between engines and processes."""

import pytest

from tests.transfer.conftest import make_engine, make_pair, pair, peer  # noqa: F401 - fixtures of these tests
from tests.transfer.test_contract import *  # noqa: F403 - its tests, over the guest's devices
from tests.transfer.test_lost_peers import test_two_processes_read_and_write_each_other  # noqa: F401

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def transport() -> str:
    return "rdma"
