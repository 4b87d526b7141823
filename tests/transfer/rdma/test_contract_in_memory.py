"""What all transports promise, kept by the rdma transport on devices in this process's memory."""

from tests.transfer.test_contract import *  # noqa: F403 - its tests, with this folder's engines
from tests.transfer.test_lifecycle import *  # noqa: F403
from tests.transfer.test_strangers import *  # noqa: F403
