"""A cluster on three hosts serves right tokens or refuses during an outage, and serves as before afterwards.
`python -m benchmarks.networks` runs all outages, five times each (docs/networks.md)."""

from collections.abc import Iterator, Mapping

import pytest

from benchmarks.networks.cluster import DECODE, FRONT, HostsCluster, hosts_cluster
from benchmarks.networks.hosts import Link, missing_requirement
from benchmarks.networks.outages import Outage, degraded, known_answers, run_outage
from tests.thoroughness import seconds

OUTAGE_S = seconds(3.0, 15.0)
CUT_OFF = Outage("the decode host is cut off", lambda net: net.isolate(DECODE), lambda net: net.rejoin(DECODE))
ONE_WAY = Outage(
    "nothing from the decode host to the front", lambda net: net.cut(DECODE, FRONT), lambda net: net.heal(DECODE, FRONT)
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsCluster]:
    if (reason := missing_requirement()) is not None:
        pytest.skip(reason)
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
