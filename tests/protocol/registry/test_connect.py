"""From what an operator writes to a registry, without ever quoting a password."""

from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from protocol.registry.connect import connect
from protocol.registry.redis_address import RedisAddress, parse
from protocol.registry.redis_registry import RedisRegistry
from protocol.registry.remote import RemoteRegistry


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
async def test_the_scheme_picks_the_registry(url: str, kind: type) -> None:
    registry = connect(url, cluster_token="secret")
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
def test_a_url_is_taken_apart(url: str, address: RedisAddress) -> None:
    assert parse(url) == address


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"redis://:{SECRET}@", "has no host"),
        (f"redis://:pa/{SECRET}@h", "cannot be understood"),
        (f"redis://me:12/{SECRET}@h", "cannot be understood"),
        (f"redis://:{SECRET}@h:x", "port that is not a number"),
        (f"redis://:{SECRET}@h:70000", "port that is not a number"),
        (f"redis://:{SECRET}@h:99999999999", "port that is not a number"),
        (f"redis://:{SECRET}@h/first", "database that is not a number"),
        (f"redis://:{SECRET}@h/1/2", "database that is not a number"),
        (f"redis://:{SECRET}@h:1,g:2", "several servers"),
        (f"redis://:{SECRET}@h#1", "cannot be understood"),
        (f"redis://:{SECRET}@h?password={SECRET}", "option other than none"),
        (f"redis://:{SECRET}@h?{SECRET}", "option other than none"),
        (f"rediss://:{SECRET}@h?verify=no", "option other than ssl_ca_certs"),
        (f"unix://:{SECRET}@run/redis.sock", "needs an absolute path"),
        (f"redis+sentinel://:{SECRET}@h:1", "names no service"),
        (f"redis+sentinel://:{SECRET}@h:1,/main", "has no host"),
        (f"memcached://:{SECRET}@h", "unknown scheme 'memcached'"),
        (f"moonserve://:{SECRET}@h:1", "must be host:port"),
        (SECRET, "must be host:port"),
        ("host", "must be host:port"),
        ("", "must be host:port"),
    ],
)
def test_a_bad_url_is_told_with_what_to_write_and_no_password(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"redis://|host:port") as caught:
        connect(url, cluster_token="secret")
    assert reason in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_address_is_shown_without_its_password() -> None:
    address = parse(f"redis+sentinel://me:{SECRET}@a:1,b:2/main?sentinel_password={SECRET}")
    assert str(address) == "a:1,b:2 service main"
    assert SECRET not in repr(address)
