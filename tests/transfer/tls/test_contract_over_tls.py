"""The contract of all transports, and what becomes of lost peers, kept by tcp inside TLS."""

from tests.transfer import test_lost_peers
from tests.transfer.test_contract import *  # noqa: F403 - its tests, with this folder's engines
from tests.transfer.test_windows import *  # noqa: F403

_ONLY_SHM = {"test_what_ended_before_the_peer_fell_silent_stays_ended"}
globals().update(
    {
        name: test
        for name, test in vars(test_lost_peers).items()
        if name.startswith("test_") and name not in _ONLY_SHM
    }
)
