"""`moonserve keys`: what it writes gateways read, and no key is ever kept."""

from __future__ import annotations

import io
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.keys import main
from deploy.ports import free_port
from gateway.access.key_file import read
from gateway.access.key_record import digest_of, new_key
from gateway.access.redis_stores import RedisKeys
from tests.patience import PATIENCE_S
from tests.redis_server import RedisServer


@pytest.mark.parametrize("place", ["file", "redis"])
def test_a_key_is_made_listed_and_revoked(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis may be slow."""
    monkeypatch.setitem(RedisKeys.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)
    if place == "file":
        is_kept(["--file", str(tmp_path / "keys.json")], capsys)
    else:
        with RedisServer() as server:
            is_kept(["--in-registry", "--registry", server.url], capsys)


def is_kept(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    about = ["--tenant", "alice", "--requests-per-minute", "60", "--priority", "-2"]
    assert main(["add", *place, *about], {}) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert key.startswith("msk-")
    assert "only time" in printed.err
    assert main(["list", *place, "--json"], {}) == 0
    listed = json.loads(capsys.readouterr().out)
    known = (listed["tenant"], listed["requests_per_minute"], listed["priority"])
    assert known == ("alice", 60, -2)
    assert listed["key_id"] == digest_of(key.encode())[: len(listed["key_id"])]
    assert main(["list", *place], {}) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown
    assert key not in shown
    assert [main(["revoke", *place, listed["key_id"]], {}) for _ in range(2)] == [0, 1]
    capsys.readouterr()
    assert main(["list", *place], {}) == 0
    assert capsys.readouterr().out == ""


def test_a_key_of_ones_own_comes_from_standard_input_and_must_not_be_guessable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, key = tmp_path / "keys.json", new_key()
    monkeypatch.setattr("sys.stdin", io.StringIO("password\n"))
    assert main(["add", "--stdin", "--file", str(path)], {}) == 2
    assert not path.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n" * 3))
    for tenant in ("old", "bob"):  # added again, it gets another record
        environ = {"MOONSERVE_API_KEY_FILE": str(path)}
        assert main(["add", "--stdin", "--tenant", tenant], environ) == 0
    assert [(k.digest, k.tenant) for k in read(path)] == [(digest_of(key.encode()), "bob")]
    assert key not in path.read_text()
    capsys.readouterr()
    assert main(["hash"], {}) == 0
    assert capsys.readouterr().out.strip() == digest_of(key.encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff" * 40), encoding="utf-8"))
    assert main(["hash"], {}) == 2
    assert "printable ASCII" in capsys.readouterr().err


def test_the_file_is_its_owners_alone_and_writers_take_turns(tmp_path: Path) -> None:
    place = ["--file", str(tmp_path / "keys.json")]
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda i: main(["add", *place, "--note", str(i)], {}), range(16)))
    assert codes == [0] * 16
    assert {key.note for key in read(tmp_path / "keys.json")} == set(map(str, range(16)))
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        ("list", 2, "--file"),
        ("list --in-registry", 2, "--registry"),
        ("list --file x --in-registry", 2, "either"),
        ("list --file /nowhere/keys.json", 2, "No such file"),
        ("add --file /nowhere/keys.json", 2, "No such file"),
        ("add --file x --streams 0", 2, "streams"),
        ("list --in-registry --registry host:1", 2, "redis://"),
        ("list --in-registry --registry redis://127.0.0.1:{nobody}", 3, "cannot be reached"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: str, code: int, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.format(nobody=free_port()).split(), {}) == code
    told = capsys.readouterr().err
    assert hint in told
    assert told.count("\n") == 1
