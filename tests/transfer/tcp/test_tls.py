"""Which peers are trusted over TLS, and what a man in the middle or an outsider can do."""

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from moonserve.protocol.errors import ConfigError, Incompatible, PeerError, PeerLost, Unauthenticated
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine
from moonserve.transfer.paths.peer_address import parse_address
from tests.authority import Authority, Files, openssl
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import TOKEN, Make, Pair
from tests.transfer.proxy import LinkFault, Towards
from tests.transfer.stage import Stage

TRANSPORTS = ["tls"]


def read(near: TransferEngine, far: TransferEngine, address: str | None = None) -> None:
    """Reads ten bytes, or is refused. The deadline is never reached."""
    memory = far.allocate(4096, readable=True)
    local = near.allocate(4096)
    remote = RemoteSegment(address or far.address, memory.segment_id)
    near.run([Transfer(Op.READ, local, 0, remote, 0, 10)], deadline_s=NEVER_S)


def test_a_certificate_of_another_authority_or_expired_is_refused_by_both_ends(
    make_engine: Make, files: Files, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines start with files that their peers will refuse.
    monkeypatch.setattr("moonserve.protocol.process.tls._self_test", lambda *files: {})
    stranger = Authority(tmp_path, "strangers").sign("stranger")
    ours = make_engine()
    refused, refuses = "peer's TLS certificate is refused", "refuses this process's TLS certificate"
    for shown, by_us, by_them in (
        (stranger, refused, refused),
        (replace(stranger, authority=files.authority), refused, refuses),
        (authority.sign("expired", days=-1), f"{refused}.*expired", f"{refuses}.*expired"),
    ):
        theirs = make_engine(files=shown)
        for near, far, words in ((ours, theirs, by_us), (theirs, ours, by_them)):
            with pytest.raises(Unauthenticated, match=words):
                read(near, far)


def test_a_certificate_for_other_addresses_is_refused(make_engine: Make, authority: Authority) -> None:
    near = make_engine()
    read(near, make_engine(files=authority.sign("nameless")))
    read(near, make_engine(files=authority.sign("named", names="DNS:store-0")))
    with pytest.raises(Unauthenticated, match=r"10\.0\.0\.9 only"):
        read(near, make_engine(files=authority.sign("elsewhere", names="IP:10.0.0.9")))


def test_a_tls_mismatch_says_what_to_do(make_engine: Make) -> None:
    encrypted, plain = make_engine(), make_engine(files=None)
    with pytest.raises(Incompatible, match="give the peer a TLS certificate"):
        read(encrypted, plain)
    with pytest.raises(Incompatible, match=r"the peer uses TLS.*give this process"):
        read(plain, encrypted)


def test_an_address_with_a_wrong_tls_mark_cannot_be_used(make_engine: Make) -> None:
    encrypted, plain = make_engine(), make_engine(files=None)
    with pytest.raises(PeerLost):
        read(plain, encrypted, encrypted.address.replace("tls=1;", ""))
    with pytest.raises(PeerLost):
        read(encrypted, plain, plain.address.replace(";tcp=", ";tls=1;tcp="))


def test_plain_bytes_on_the_encrypted_port_end_their_connection_only(pair: Pair) -> None:
    host, _, port = parse_address(pair.far.address).rails["tcp"][0].endpoint.rpartition(":")
    for garbage in (b"\0" * 100, b"MOONXFER" + bytes(35), b"\x16\x03\x01\x40\x00" + b"x" * 300):
        with socket.create_connection((host, int(port)), PATIENCE_S) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(PATIENCE_S)
            while sock.recv(4096):
                pass
    pair.run(pair.read(0, 0, 10))


def test_an_eavesdropper_sees_no_plain_bytes(stage: Stage) -> None:
    proxy, address = stage.proxy()
    proxy.seen = bytearray()
    stage.run(stage.transfer(Op.WRITE, address, 64 << 10))
    stage.require_arrived()
    assert len(proxy.seen) > 64 << 10
    assert not any(stage.content[at : at + 16] in proxy.seen for at in range(0, 64 << 10, 1024))


def test_a_byte_changed_in_transit_never_reaches_memory(stage: Stage) -> None:
    proxy, address = stage.proxy()
    proxy.seen = bytearray()
    stage.run(stage.transfer(Op.WRITE, address, 10))
    stage.near.forget(address)
    at = len(proxy.seen) + (6 << 10)  # on the next connection, in the middle of a TLS record
    proxy.flip = LinkFault(Towards.TARGET, at=at, times=100)
    before = bytes(stage.memory.buffer)
    with pytest.raises(PeerError):
        stage.near.run([stage.transfer(Op.WRITE, address, 12 << 10)], deadline_s=PATIENCE_S)
    assert proxy.flip.times < 100
    assert stage.memory.buffer == before


def test_an_engine_does_not_start_with_unusable_tls_files(files: Files, authority: Authority, tmp_path: Path) -> None:
    (nonsense := tmp_path / "nonsense.pem").write_text("nonsense")
    locked, stranger = tmp_path / "locked.key", Authority(tmp_path, "other").certificate
    openssl(f"pkey -in {files.key} -aes256 -passout pass:secret -out {locked}")
    names = ("certificate", "key", "authority")
    wrong = [(replace(files, **{name: nonsense}), str(nonsense)) for name in names]
    wrong += [
        (replace(files, key=Path("/nowhere/missing.pem")), "/nowhere/missing.pem: No such file"),
        (replace(files, key=authority.sign("other").key), "do not belong together"),
        (replace(files, key=locked), "password"),  # does not prompt for one
        (replace(files, authority=stranger), str(stranger)),
        (authority.sign("expired", days=-1), "expired"),
    ]
    for each, words in wrong:
        with pytest.raises(ConfigError, match=re.escape(words)):
            TransferEngine(cluster_token=TOKEN, options=each.transfer_options()).start()
