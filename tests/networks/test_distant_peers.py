"""The number of TCP connections to a peer follows the round trip that the kernel measures."""

from contextlib import closing

import pytest

from benchmarks.networks.hosts import Link, Network, missing_requirement, network
from moonserve.transfer import Op, Transfer, TransferEngine, TransferOptions
from tests.patience import PATIENCE_S

NBYTES = 1 << 20


def _started(net: Network, host: int) -> TransferEngine:
    options = TransferOptions(host=net.address(host), transports=("tcp",), slice_bytes=NBYTES // 16)
    engine = TransferEngine(cluster_token="token", options=options)
    engine.start()
    return engine


def _num_connections(net: Network, host: int, peer: str) -> int:
    with closing(_started(net, host)) as engine:
        (remote,) = engine.open(peer, deadline_s=PATIENCE_S)
        read = Transfer(Op.READ, engine.allocate(NBYTES), 0, remote, 0, NBYTES)
        engine.run([read], deadline_s=PATIENCE_S)
        return engine.usage().num_endpoints


@pytest.mark.parametrize(("host", "expected"), [(0, 1), (1, 4)], ids=["the same host", "10 ms away"])
def test_distant_hosts_use_several_connections(host: int, expected: int) -> None:
    if (reason := missing_requirement()) is not None:
        pytest.skip(reason)
    with network(2) as net, closing(net.within(0, lambda: _started(net, 0))) as peer:
        net.shape(0, Link(delay_s=10e-3))
        peer.allocate(NBYTES, readable=True)
        assert net.within(host, lambda: _num_connections(net, host, peer.address)) == expected
