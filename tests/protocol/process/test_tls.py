"""Tests of TLS: peers without a certificate of the cluster's authority cannot call its processes or learn from them.

Refusals are checked from both sides, over gRPC and sockets, against real servers.
"""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from moonserve.protocol.errors import ConfigError, Incompatible, MoonserveError, PeerLost, Unauthenticated
from moonserve.protocol.pb import registry_pb2, registry_pb2_grpc
from moonserve.protocol.process.tls import CLUSTER_NAME, Certificates, TlsConfig, files_in, load_certificates
from moonserve.protocol.rpc import socket_addresses
from moonserve.protocol.rpc.grpc_transport import TOKEN_HEADER, Channels, RpcServer
from moonserve.protocol.rpc.socket_client_sync import SyncChannel
from tests.authority import Authority, Files
from tests.patience import PATIENCE_S

TOKEN = "secret"
ASK = registry_pb2.RegistryMembersRequest()
MEMBERS = "/moonserve.Registry/Members"


class Counting(registry_pb2_grpc.RegistryServicer):
    """A registry service that counts the calls that reach it."""

    calls = 0

    async def Members(self, request: object, context: object) -> registry_pb2.RegistryMembers:
        self.calls += 1
        return registry_pb2.RegistryMembers()


@dataclass(frozen=True)
class Served:
    service: Counting
    rpc: str
    lean: str
    unix: str


@asynccontextmanager
async def serving(tls: Certificates | None) -> AsyncIterator[Served]:
    server, service = RpcServer(TOKEN, tls), Counting()
    registry_pb2_grpc.add_RegistryServicer_to_server(service, server.grpc)
    server.add_socket_service("Registry", service)
    async with server.serving("127.0.0.1", 0, 0) as address:
        yield Served(service, address, server.lean_address, server.lean_unix_address)


@pytest.fixture
async def served(tls: Certificates) -> AsyncIterator[Served]:
    async with serving(tls) as served:
        yield served


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"), "other")


async def ask(address: str, tls: Certificates | None) -> None:
    """Makes a call from asyncio. Raises its error if it is refused."""
    async with Channels(TOKEN, tls) as channels:
        stub = registry_pb2_grpc.RegistryStub(channels.to(address))
        await channels.call(stub.Members, ASK, timeout_s=PATIENCE_S)


async def ask_in_a_thread(address: str, tls: Certificates | None) -> None:
    def call() -> None:
        with SyncChannel(address, TOKEN, tls) as channel:
            channel.call(MEMBERS, b"", timeout_s=PATIENCE_S)

    await asyncio.to_thread(call)


async def refusal(asking: Callable[..., object], *arguments: object) -> MoonserveError:
    with pytest.raises(MoonserveError) as caught:
        await asking(*arguments)  # type: ignore[misc]
    return caught.value


async def test_members_are_answered_over_every_transport(served: Served, tls: Certificates) -> None:
    for address in (served.rpc, served.lean, served.unix):
        await ask(address, tls)
    for address in (served.lean, served.unix):
        await ask_in_a_thread(address, tls)
    assert served.service.calls == 5
    assert served.lean.startswith(socket_addresses.TLS)


@pytest.mark.parametrize("shown", ["nothing", "of another authority", "expired", "no tls"])
async def test_client_without_certificate_is_refused_despite_the_token(
    served: Served, tls: Certificates, authority: Authority, other: Authority, shown: str
) -> None:
    files = {
        "nothing": None,
        "of another authority": other.sign("foreign", names="IP:127.0.0.1"),
        "expired": authority.sign("expired", names="IP:127.0.0.1", days=-1),
    }.get(shown)
    channel = grpc.aio.insecure_channel(served.rpc)
    if shown != "no tls":
        pems = () if files is None else (files.key.read_bytes(), files.certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), *pems)
        channel = grpc.aio.secure_channel(served.rpc, credentials)
    async with channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Members(ASK, metadata=((TOKEN_HEADER, TOKEN),), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    context = None if shown == "no tls" else _context(authority, files)
    assert await asyncio.to_thread(_says_hello, served.lean, context) == b""
    await ask(served.rpc, tls)
    await ask(served.lean, tls)
    assert served.service.calls == 2  # the member's calls


def _context(authority: Authority, files: Files | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    context.check_hostname = False
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


def _says_hello(address: str, context: ssl.SSLContext | None) -> bytes:
    """Begins a handshake and returns the server's answer, which is empty if the server disconnects in any way."""
    family, target = socket_addresses.parse_address(address)
    with socket.socket(family) as plain:
        plain.settimeout(PATIENCE_S)
        plain.connect(target)
        try:
            with plain if context is None else context.wrap_socket(plain) as sock:
                sock.sendall(b"MOONLEAN\x01\x00" + bytes(32))
                answer: bytes = sock.recv(64)
        except (ssl.SSLError, ConnectionError):
            return b""
        # A TLS alert is not an answer of the socket server.
        return b"" if answer[:1] == b"\x15" else answer


async def test_server_of_another_authority_is_refused_before_sending_token(tls: Certificates, other: Authority) -> None:
    async with serving(load_certificates(other.sign("server", names="IP:127.0.0.1").tls)) as served:
        for asking, address in ((ask, served.rpc), (ask, served.lean), (ask_in_a_thread, served.lean)):
            error = await refusal(asking, address, tls)
            assert isinstance(error, Unauthenticated)
            assert "certificate is refused" in error.message
        assert served.service.calls == 0


async def test_server_at_an_address_not_in_its_certificate_is_refused(tls: Certificates, authority: Authority) -> None:
    async with serving(load_certificates(authority.sign("far", names="IP:10.9.9.9").tls)) as served:
        assert "must list the dialled address" in (await refusal(ask, served.rpc, tls)).message
        for asking in (ask, ask_in_a_thread):
            error = await refusal(asking, served.lean, tls)
            assert isinstance(error, Unauthenticated)
            assert "10.9.9.9 only" in error.message


async def test_certificate_with_cluster_name_is_accepted_at_any_address(authority: Authority) -> None:
    named = load_certificates(authority.sign("named", names=f"DNS:{CLUSTER_NAME}").tls)
    async with serving(named) as served:
        for address in (served.rpc, served.lean):
            await ask(address, named)


async def test_error_says_which_end_lacks_tls(tls: Certificates) -> None:
    async with serving(tls) as served:
        error = await refusal(ask, served.rpc, None)
        assert isinstance(error, PeerLost)
        assert "speaks TLS and this process does not" in error.message
        for asking in (ask, ask_in_a_thread):
            error = await refusal(asking, served.lean, None)
            assert isinstance(error, Incompatible)
            assert "--tls-certificate" in error.message
    async with serving(None) as served:
        error = await refusal(ask, served.rpc, tls)
        assert "this process speaks TLS and the peer does not" in error.message
        assert isinstance(await refusal(ask, served.lean, tls), Incompatible)
        assert served.service.calls == 0


def test_all_three_tls_files_or_none_are_required(authority: Authority) -> None:
    assert TlsConfig().tls() is None
    assert files_in({}) is None
    with pytest.raises(ConfigError, match="give all three"):
        TlsConfig(tls_certificate=str(authority.certificate)).tls()
    with pytest.raises(ConfigError, match="give all three"):
        files_in({"MOONSERVE_TLS_KEY": "key.pem"})


async def test_peer_that_disconnects_before_handshake_leaves_no_socket(tls: Certificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # resets the connection
    fd = sock.fileno()
    with pytest.raises(ConnectionResetError):
        tls.initiator.wrap_socket(sock)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
