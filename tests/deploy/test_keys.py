"""`moonserve keys`: what it writes gateways read, and no key is ever kept."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.keys import main
from gateway.keys.file import KeyFile, read
from gateway.keys.record import ApiKey, digest_of, new_key
from gateway.keys.redis_keys import RedisKeys
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The arguments that say where keys are; a Redis may be slow."""
    if request.param == "file":
        return ["--file", str(tmp_path / "keys.json")]
    server: RedisServer = request.getfixturevalue("redis")
    server.ask("FLUSHALL")
    monkeypatch.setitem(RedisKeys.__init__.__kwdefaults__, "deadline_s", PATIENCE_S)
    return ["--in-registry", "--registry", server.url]


def test_a_key_is_made_listed_and_revoked(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    about = ["--tenant", "alice", "--requests-per-minute", "60", "--priority", "-2"]
    assert main(["add", *place, *about], {}) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert key.startswith("msk-")
    assert "only time" in printed.err
    assert main(["list", *place, "--json"], {}) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["tenant"] == "alice"
    assert (listed["requests_per_minute"], listed["priority"]) == (60, -2)
    assert listed["key_id"] == digest_of(key.encode())[: len(listed["key_id"])]
    assert main(["list", *place], {}) == 0
    shown = capsys.readouterr().out
    assert "alice" in shown
    assert key not in shown
    assert main(["revoke", *place, listed["key_id"]], {}) == 0
    assert main(["revoke", *place, listed["key_id"]], {}) == 1
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
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n{key}\n"))
    assert main(["add", "--stdin", "--tenant", "bob"], {"MOONSERVE_API_KEY_FILE": str(path)}) == 0
    assert [(k.digest, k.tenant) for k in read(path)] == [(digest_of(key.encode()), "bob")]
    assert key not in path.read_text()
    capsys.readouterr()
    assert main(["hash"], {}) == 0
    assert capsys.readouterr().out.strip() == digest_of(key.encode())


def test_the_file_is_its_owners_alone_and_writers_take_turns(tmp_path: Path) -> None:
    place = ["--file", str(tmp_path / "keys.json")]
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda i: main(["add", *place, "--note", str(i)], {}), range(16)))
    assert codes == [0] * 16
    assert {key.note for key in read(tmp_path / "keys.json")} == set(map(str, range(16)))
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


def test_a_key_that_is_no_text_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff" * 40), encoding="utf-8"))
    assert main(["hash"], {}) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "printable ASCII" in line


async def test_adding_a_key_again_replaces_its_record(tmp_path: Path) -> None:
    file, digest = KeyFile(tmp_path / "keys.json"), digest_of(b"x")
    await file.add(ApiKey(digest=digest, tenant="old"))
    await file.add(ApiKey(digest=digest, tenant="new"))
    assert [key.tenant for key in await file.all()] == ["new"]


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["list"], 2, "--file"),
        (["list", "--in-registry"], 2, "--registry"),
        (["list", "--file", "x", "--in-registry"], 2, "either"),
        (["list", "--file", "/nowhere/keys.json"], 2, "No such file"),
        (["add", "--file", "/nowhere/keys.json"], 2, "No such file"),
        (["add", "--file", "x", "--streams", "0"], 2, "streams"),
        (["list", "--in-registry", "--registry", "host:1"], 2, "redis://"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], code: int, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, {}) == code
    told = capsys.readouterr().err
    assert hint in told
    assert told.count("\n") == 1


def test_a_redis_that_is_not_there_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    assert main(["list", "--in-registry", "--registry", url], {}) == 3
    assert "cannot be reached" in capsys.readouterr().err
