"""The work of the scaling benchmark."""

import numpy as np
import pytest

from benchmarks.transfer.crowd import by_peer
from benchmarks.transfer.workload import KIB, POOL_BYTES, REMOTE, Load


@pytest.mark.parametrize("peers", [1, 4, 64])
def test_each_batch_goes_to_one_peer_and_the_peers_take_turns(peers: int) -> None:
    load = Load("read", 64 * KIB, requests=4)
    requests, share = np.concatenate(load.batches()), POOL_BYTES // peers
    batches = by_peer(requests, share, load.requests)
    owners = batches[:, :, 0, REMOTE] // share
    assert (owners == owners[:, :1]).all()
    assert owners[:peers, 0].tolist() == list(range(peers))
    np.testing.assert_array_equal(
        np.sort(batches.reshape(-1, 2), axis=0), np.sort(requests.reshape(-1, 2), axis=0)
    )
