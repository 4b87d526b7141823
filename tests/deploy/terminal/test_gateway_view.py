"""What a gateway does not answer, or answers amiss, is one error that names its address."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from deploy.remote.chat_stream import Reply, Said, ask
from deploy.terminal.gateway_view import cluster_view
from protocol.errors import MoonserveError

BROKEN_OFF = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n40\r\ndata: {"


def answer_once(server: socket.socket, said: bytes) -> None:
    """Reads a request, says this to it, and hangs up."""
    connection, _ = server.accept()
    with connection, connection.makefile("rb") as request:
        length = 0
        while (line := request.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        request.read(length)
        connection.sendall(said)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x12\x04",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\n{",
    ],
)
def test_a_port_of_another_protocol_and_a_broken_answer_are_no_answer(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        answered = threads.submit(answer_once, server, said)
        with pytest.raises(MoonserveError, match=f"no answer from {url}"):
            cluster_view(url, "")
        answered.result()


def test_an_address_whose_port_is_no_number_is_told() -> None:
    with pytest.raises(MoonserveError, match="no answer from http://localhost:80x"):
        cluster_view("http://localhost:80x", "")


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        answered = threads.submit(answer_once, server, BROKEN_OFF)
        with pytest.raises(MoonserveError, match=f"no answer from {url}"):
            list(ask(url, "", "model", [Said("user", "hello")], {}, Reply()))
        answered.result()
