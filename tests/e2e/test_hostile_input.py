"""Clients that hardly read, send rubbish or say nothing: nobody else notices, and nothing is kept for them anywhere.

What the gateway answers to each thing that no client should send is in tests/gateway/test_refusals.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.cluster import Cluster, small_cluster
from tests.e2e.raw_http import RawClient
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 4_096
GIVES_UP_S = 5
"""What the gateway has with clients that hardly read or send."""

REFUSED = (
    *(b"", b"null", b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100_000, bytes(1_000)),
    *(json.dumps({"prompt": [1, 2], "max_tokens": n}).encode() for n in (0, -1, 10**30, "8")),
    *(json.dumps({"prompt": p}).encode() for p in ([-1], [2**32], [1] * 9_999, "x" * 8_000_000)),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = (
        *("--dtype", "float32", "--kv-cache-memory", "32MiB"),
        *("--slow-client-s", str(GIVES_UP_S), "--body-timeout-s", str(GIVES_UP_S)),
    )
    folder = tmp_path_factory.mktemp("hostile")
    with small_cluster(folder, *flags, context=MAX_MODEL_LEN) as started:
        yield started
        started.wait_until_all_is_free()
        assert not started.tracebacks(), started.logs()


@pytest.fixture(autouse=True)
def _still_serving(cluster: Cluster) -> Iterator[None]:
    yield
    assert_serves(cluster)


def assert_serves(cluster: Cluster) -> None:
    answer = cluster.complete([1, 2, 3], max_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


def test_what_no_client_should_send_is_refused_in_openais_form(cluster: Cluster) -> None:
    for body in REFUSED:
        with RawClient(cluster) as client:
            client.send("/v1/completions", body)
            reply = client.reply()
            error = json.loads(reply.read())["error"]
        assert reply.status == 400, body[:100]
        assert error["type"] == "invalid_request_error"
        assert {"message", "type", "param", "code"} <= set(error)


def test_a_body_that_never_comes_whole(cluster: Cluster) -> None:
    with RawClient(cluster) as client:
        client.send("/v1/completions", b'{"prompt"', headers={"Content-Length": "1000"})
        assert_serves(cluster)
        assert client.reply().status == 408


@pytest.mark.parametrize("reads", [True, False], ids=["a byte a second", "nothing"])
def test_a_client_that_hardly_reads_delays_nobody_and_is_given_up(
    cluster: Cluster, reads: bool
) -> None:
    """Chunks with 20 alternatives per token are kilobytes: the buffers on the way fill within seconds."""
    stopping = threading.Event()
    with RawClient(cluster, receive_buffer=2_048) as client:
        port = client.socket.getsockname()[1]
        cluster.wait_for("the connection", lambda: port in client_ports(cluster))
        client.ask([1, 2, 3], max_tokens=MAX_MODEL_LEN - 3, logprobs=20, n=8)
        reader = threading.Thread(target=read_slowly, args=(client, stopping, reads))
        reader.start()
        try:
            deadline = time.monotonic() + 3 * PATIENCE_S
            while port in client_ports(cluster):
                assert_serves(cluster)
                assert time.monotonic() < deadline
        finally:
            stopping.set()
            reader.join()
        with pytest.raises(ConnectionResetError):  # nothing is kept for it, in the kernel neither
            read_on(client)
    cluster.wait_until_all_is_free()


def read_slowly(client: RawClient, stopping: threading.Event, reads: bool) -> None:
    """Until told to stop, or the connection ends."""
    while not stopping.wait(1.0):
        if reads and not client.socket.recv(1):
            return


def read_on(client: RawClient) -> None:
    """To the end of the connection."""
    while client.socket.recv(65_536):
        pass


def client_ports(cluster: Cluster) -> set[int]:
    """Where the connections that the gateway has open come from."""
    gateway = psutil.Process(cluster.pids()["gateway-0"])
    return {c.raddr.port for c in gateway.net_connections("tcp") if c.raddr}


def test_hundreds_of_connections_that_say_nothing(cluster: Cluster) -> None:
    clients = [RawClient(cluster) for _ in range(300)]
    try:
        assert_serves(cluster)
    finally:
        for client in clients:
            client.leave()
