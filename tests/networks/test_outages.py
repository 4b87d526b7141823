"""A cluster on three hosts serves right tokens or refuses during an outage, and serves as before afterwards.
`python -m benchmarks.networks` runs all outages, five times each (docs/networks.md)."""

from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest

from benchmarks.networks.cluster import DECODE, FRONT, HostsCluster, hosts_cluster
from benchmarks.networks.hosts import Link, Network, missing_requirement, network
from benchmarks.networks.outages import Outage, degraded, known_answers, run_outage
from moonserve.transfer import Op, Transfer, TransferEngine, TransferOptions
from tests.patience import PATIENCE_S
from tests.thoroughness import seconds

pytestmark = pytest.mark.skipif(bool(missing_requirement()), reason=str(missing_requirement()))
POOL_BYTES = 1 << 20
OUTAGE_S = seconds(3.0, 15.0)
CUT_OFF = Outage("the decode host is cut off", lambda net: net.isolate(DECODE), lambda net: net.rejoin(DECODE))
ONE_WAY = Outage(
    "nothing from the decode host to the front", lambda net: net.cut(DECODE, FRONT), lambda net: net.heal(DECODE, FRONT)
)


def _started(net: Network, host: int) -> TransferEngine:
    options = TransferOptions(host=net.address(host), transports=("tcp",), slice_bytes=POOL_BYTES // 16)
    engine = TransferEngine(cluster_token="token", options=options)
    engine.start()
    return engine


def test_distant_hosts_use_several_connections() -> None:
    def num_connections(host: int) -> int:
        with closing(_started(net, host)) as engine:
            (remote,) = engine.open(peer.address, deadline_s=PATIENCE_S)
            read = Transfer(Op.READ, engine.allocate(POOL_BYTES), 0, remote, 0, POOL_BYTES)
            engine.run([read], deadline_s=PATIENCE_S)
            return engine.usage().num_endpoints

    with network(2) as net, closing(net.within(0, lambda: _started(net, 0))) as peer:
        net.shape(0, Link(delay_s=10e-3))
        peer.allocate(POOL_BYTES, readable=True)
        assert [net.within(host, lambda host=host: num_connections(host)) for host in range(2)] == [1, 4]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    with hosts_cluster(tmp_path_factory.mktemp("hosts") / "logs") as cluster:
        yield cluster
        assert cluster.alive()
        assert not cluster.tracebacks()


@pytest.fixture(scope="module")
def known(cluster: HostsCluster) -> Mapping[str, str]:
    return known_answers(cluster)


@pytest.mark.parametrize("outage", [CUT_OFF, ONE_WAY], ids=lambda outage: outage.title)
def test_outages_change_no_token_and_the_cluster_recovers(
    cluster: HostsCluster, known: Mapping[str, str], outage: Outage
) -> None:
    report = run_outage(cluster, outage, known, OUTAGE_S)  # raises unless the cluster serves again
    assert report.outcomes["wrong"] == 0
    assert report.outcomes["cut"] == 0, "each request ends in an answer or in an error"
    assert sum(report.outcomes.values()) > 0


def test_lost_and_late_packets_change_no_token(cluster: HostsCluster, known: Mapping[str, str]) -> None:
    link = Link(delay_s=0.01, loss=0.02, bytes_per_s=12.5e6)
    assert degraded(cluster, link, known) == {"right": len(known)}
