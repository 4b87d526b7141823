"""Tests of what a process needs to join: a registry address, whose password is never shown, and an identity."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.membership.registry.client import RemoteRegistry, connect_registry
from moonserve.protocol.membership.registry.lease import IDENTITY_FILE, Identity, load_or_create_identity
from moonserve.protocol.membership.registry.redis_registry import RedisRegistry
from moonserve.protocol.membership.registry.redis_url import RedisAddress, parse_redis_url


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("127.0.0.1:7000", RemoteRegistry),
        ("moonserve://node-1:7000", RemoteRegistry),
        ("[::1]:7000", RemoteRegistry),
        ("redis://127.0.0.1:6379/0", RedisRegistry),
        ("rediss://redis.example:6380", RedisRegistry),
        ("unix:///run/redis.sock", RedisRegistry),
        ("redis+sentinel://a:1,b:2/main", RedisRegistry),
        ("rediss+sentinel://a/main/3", RedisRegistry),
    ],
)
async def test_scheme_selects_the_registry(url: str, kind: type) -> None:
    registry = connect_registry(url, cluster_token="secret")
    assert isinstance(registry, kind)
    await registry.close()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", RedisAddress(hosts=(("h", 6379),))),
        ("redis://[::1]/", RedisAddress(hosts=(("::1", 6379),))),
        (
            "rediss://me:p%2Fw%40@h:1/2?ssl_ca_certs=/ca.pem",
            RedisAddress(
                hosts=(("h", 1),), db=2, tls=True, username="me", password="p/w@", options={"ssl_ca_certs": "/ca.pem"}
            ),
        ),
        ("unix://:word@/run/my%20redis.sock?db=4", RedisAddress(path="/run/my redis.sock", db=4, password="word")),
        (
            "redis+sentinel://:word@a,b:2,[::1]:3/main/5?sentinel_password=other",
            RedisAddress(
                hosts=(("a", 26379), ("b", 2), ("::1", 3)),
                service="main",
                db=5,
                password="word",
                options={"sentinel_password": "other"},
            ),
        ),
    ],
)
def test_redis_url_is_parsed(url: str, address: RedisAddress) -> None:
    assert parse_redis_url(url) == address


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("reason", "urls"),
    [
        ("needs a host", [f"redis://:{SECRET}@", f"redis+sentinel://:{SECRET}@h:1,/main"]),
        ("is malformed", [f"redis://:pa/{SECRET}@h", f"redis://me:12/{SECRET}@h", f"redis://:{SECRET}@h#1"]),
        ("a port from 1 to 65535", [f"redis://:{SECRET}@h:{port}" for port in ("x", "70000", "99999999999")]),
        ("needs a number as its database", [f"redis://:{SECRET}@h/{db}" for db in ("first", "1/2")]),
        ("several servers", [f"redis://:{SECRET}@h:1,g:2"]),
        ("option other than none", [f"redis://:{SECRET}@h?password={SECRET}", f"redis://:{SECRET}@h?{SECRET}"]),
        ("option other than ssl_ca_certs", [f"rediss://:{SECRET}@h?verify=no"]),
        ("needs an absolute path", [f"unix://:{SECRET}@run/redis.sock"]),
        ("names no service", [f"redis+sentinel://:{SECRET}@h:1"]),
        ("unknown scheme 'memcached'", [f"memcached://:{SECRET}@h"]),
        ("must be host:port", [f"moonserve://:{SECRET}@h:1", SECRET, "host", ""]),
    ],
)
def test_error_of_bad_url_names_valid_forms_and_no_password(reason: str, urls: list[str]) -> None:
    for url in urls:
        with pytest.raises(ConfigError, match=r"redis://|host:port") as caught:
            connect_registry(url, cluster_token="secret")
        assert reason in str(caught.value)
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None


def test_address_text_omits_the_password() -> None:
    address = parse_redis_url(f"redis+sentinel://me:{SECRET}@a:1,b:2/main?sentinel_password={SECRET}")
    assert str(address) == "a:1,b:2 service main"
    assert SECRET not in repr(address)


def test_folder_keeps_owner_and_highest_epoch(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    first = load_or_create_identity(folder, "store-0")
    assert load_or_create_identity(folder, "store-0") == first
    assert len(first.owner) == 32
    first.with_epoch(9).with_epoch(4)
    assert load_or_create_identity(folder, "store-0").last_epoch == 9
    assert [path.name for path in folder.iterdir()] == [IDENTITY_FILE], "nothing else is left"
    assert stat.S_IMODE((folder / IDENTITY_FILE).stat().st_mode) == 0o600


def test_each_identity_without_folder_has_a_new_owner() -> None:
    first, second = load_or_create_identity(None, "store-0"), load_or_create_identity(None, "store-0")
    assert first.owner != second.owner
    assert first.with_epoch(5).last_epoch == 5


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"instance_id": 1, "owner": "x"}', '{"instance_id": "store-0"}']
)
def test_damaged_identity_file_is_refused_with_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / IDENTITY_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"identity\.json is damaged; delete it"):
        load_or_create_identity(tmp_path, "store-0")


def test_folder_of_another_id_and_unusable_folder_are_refused_with_remedy(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path, "store-0")
    with pytest.raises(ConfigError, match=r"belongs to store-0, not to store-1: start with that id"):
        load_or_create_identity(tmp_path, "store-1")
    with pytest.raises(ConfigError, match="cannot keep this process's identity"):
        load_or_create_identity(tmp_path / IDENTITY_FILE, "store-0")


def test_concurrent_creation_gives_one_identity(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: load_or_create_identity(tmp_path, "store-0"), range(32)))
    assert len({identity.owner for identity in found}) == 1


def test_identity_file_of_later_release_is_read(tmp_path: Path) -> None:
    kept = {"instance_id": "store-0", "owner": "x", "colour": "blue"}
    (tmp_path / IDENTITY_FILE).write_text(json.dumps(kept))
    assert load_or_create_identity(tmp_path, "store-0") == Identity(instance_id="store-0", owner="x", folder=tmp_path)
