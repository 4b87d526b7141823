"""Whole cluster in which all TCP traffic between processes uses TLS, except for HTTP."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from moonserve.protocol.errors import PeerLost, Unauthenticated
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.tls import Certificates, load_certificates
from moonserve.protocol.rpc.grpc_transport import TOKEN_HEADER, Channels
from tests.authority import Authority
from tests.e2e.cluster import Cluster, small_cluster
from tests.e2e.reference import continuations, load_reference, num_ties
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Cluster]:
    files = authority.sign("cluster", names="IP:127.0.0.1")
    flags = ("--dtype", "float32", "--transports", "tcp", *files.flags)
    with small_cluster(tmp_path_factory.mktemp("encrypted"), *flags) as started:
        yield started
        assert not started.tracebacks(), started.logs()


def test_a_request_is_served_with_the_right_tokens(cluster: Cluster) -> None:
    prompts = [list(range(16, 16 + length)) for length in (150, 40)]
    expected = continuations(load_reference(cluster.model), prompts, num_tokens=12)
    for prompt, continuation in zip(prompts, expected, strict=True):
        for _ in range(2):  # the second time with the KV of the first, from the store
            answer = cluster.greedy(prompt, 12, logprobs=0)
            num_ties(answer, continuation)


@pytest.mark.parametrize("role", ["prefill", "decode", "store"])
async def test_a_peer_with_the_token_and_no_certificate_of_the_cluster_is_refused(
    cluster: Cluster, authority: Authority, tmp_path: Path, role: str
) -> None:
    [address] = [each["rpc_address"] for each in cluster.instances() if each["role"] == role]
    with pytest.raises(PeerLost, match="speaks TLS and this process does not"):
        await _ask(address, cluster.token, None)
    other = load_certificates(Authority(tmp_path, "other").sign("stranger", names="IP:127.0.0.1").tls)
    with pytest.raises(Unauthenticated, match="certificate is refused"):
        await _ask(address, cluster.token, other)
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    async with grpc.aio.secure_channel(address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await worker_pb2_grpc.WorkerStub(channel).GetStatus(
                worker_pb2.GetStatusRequest(), metadata=((TOKEN_HEADER, cluster.token),), timeout=PATIENCE_S
            )


async def _ask(address: str, token: str, tls: Certificates | None) -> None:
    async with Channels(token, tls) as channels:
        stub = worker_pb2_grpc.WorkerStub(channels.to(address))
        request = worker_pb2.GetStatusRequest()
        await channels.call(stub.GetStatus, request, timeout_s=PATIENCE_S)
