"""What all transports promise, kept by the rdma transport on devices in this process's memory."""

from tests.transfer.test_contract import *  # noqa: F403 - its tests, with this folder's engines
from tests.transfer.test_lifecycle import *  # noqa: F403
from tests.transfer.test_strangers import *  # noqa: F403

# The devices of a test's memory do not reach another process.
del test_two_processes_read_and_write_each_other  # noqa: F821
del test_a_segment_in_use_cannot_be_deregistered  # noqa: F821
