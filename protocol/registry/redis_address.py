"""Where a Redis is: its URL in parts. Pure; `redis_client` connects.

Rule: a password never leaves this module's dataclass: not by `repr`, not in an error, not by quoting a URL that could
not be understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from protocol.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
REDIS_PORT = 6379
SENTINEL_PORT = 26379

FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://… for TLS, unix:///path/to/socket[?db=N], or "
    "redis+sentinel://[user:password@]host:port,host:port/service[/db]; "
    "percent-encode / : @ ? # and % in passwords"
)
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A server (one in `hosts`), a local socket (`path`), or the Sentinels that know where `service` is."""

    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    service: str | None = None
    db: int = 0
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # from the query

    def __str__(self) -> str:
        """For people; without credentials."""
        where = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{where} service {self.service}" if self.service else where


def parse(url: str) -> RedisAddress:
    """Raises ConfigError that says what is wrong and which forms there are, without quoting what may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:  # its text may quote the password
        raise _bad("cannot be understood") from None
    if parts.scheme not in SCHEMES:
        raise _bad("has an unknown scheme")
    if parts.fragment:
        raise _bad("has a # outside of a percent-encoded password")
    options = _options(parts)
    username, password = _user(parts)
    if parts.scheme == "unix":
        return _unix(parts, options, username, password)
    return _network(parts, options, username, password)


def _unix(
    parts: SplitResult, options: dict[str, str], username: str | None, password: str | None
) -> RedisAddress:
    if parts.netloc.rpartition("@")[2] or not parts.path.startswith("/"):
        raise _bad("needs an absolute path: unix:///path/to/socket")
    db = _db(options.pop("db", "0"))
    path = unquote(parts.path)
    return RedisAddress(path=path, db=db, username=username, password=password, options=options)


def _network(
    parts: SplitResult, options: dict[str, str], username: str | None, password: str | None
) -> RedisAddress:
    by_sentinel = parts.scheme.endswith("+sentinel")
    if "@" in parts.path:
        raise _bad("has a / before its @")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if not by_sentinel and len(hosts) > 1:
        raise _bad("names several servers; for Sentinels the scheme is redis+sentinel")
    path = [unquote(step) for step in parts.path.strip("/").split("/") if step]
    service = None
    if by_sentinel:
        if not path:
            raise _bad("names no service; Sentinels are asked for one: …host:port/service")
        service = path.pop(0)
    if len(path) > 1:
        raise _bad("has too many / in its path")
    default_port = SENTINEL_PORT if by_sentinel else REDIS_PORT
    return RedisAddress(
        hosts=tuple(_host(host, default_port) for host in hosts),
        service=service,
        db=_db(path[0] if path else "0"),
        tls=parts.scheme.startswith("rediss"),
        username=username,
        password=password,
        options=options,
    )


def _user(parts: SplitResult) -> tuple[str | None, str | None]:
    user, _, _ = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return unquote(name) or None, unquote(password) or None


def _host(text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port` or `[v6]:port`."""
    host, colon, digits = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, digits = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise _bad("names no host")
    # What stands here may be the rest of a password with a / in it, so it is not quoted.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 5 and 0 < int(digits) < 65536):
        raise _bad("has a port that is not a number from 1 to 65535")
    return host, int(digits)


def _db(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise _bad("has a database that is not a number")
    return int(text)


def _options(parts: SplitResult) -> dict[str, str]:
    allowed: tuple[str, ...] = ()
    if parts.scheme == "unix":
        allowed = ("db",)
    if parts.scheme.startswith("rediss"):
        allowed += TLS_OPTIONS
    if parts.scheme.endswith("+sentinel"):
        allowed += SENTINEL_OPTIONS
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if (parts.query and not options) or options.keys() - set(allowed):
        raise _bad(f"has an option other than {', '.join(allowed) or 'none'} after the ?")
    return options


def _bad(what: str) -> ConfigError:
    return ConfigError(f"the registry's URL {what}; write {FORMS}")
