"""Parser of Redis URLs. Pure; `redis_client` connects.

Passwords are never shown: not by `repr`, not in an error, and not by quoting a URL that cannot be parsed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from moonserve.protocol.errors import ConfigError

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
REDIS_PORT = 6379
SENTINEL_PORT = 26379

REDIS_URL_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://… for TLS, unix:///path/to/socket[?db=N], or "
    "redis+sentinel://[user:password@]host:port,host:port/service[/db]; "
    "percent-encode / : @ ? # and % in passwords"
)
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Address of a server (one entry in `hosts`), a local socket (`path`), or the Sentinels (`hosts`) of `service`."""

    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    service: str | None = None
    db: int = 0
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict, repr=False)  # from the query

    def __str__(self) -> str:
        """Address for log lines, without credentials."""
        where = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{where} service {self.service}" if self.service else where


_URL = re.compile(
    r"(?P<scheme>[a-z+]+)://(?:(?P<username>[^:@/?#]*)(?::(?P<password>[^:@/?#]*))?@)?"
    r"(?P<hosts>[^@/?#]*)(?P<path>/[^@?#]*)?(?:\?(?P<query>[^#]+))?"
)
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


def parse_redis_url(url: str) -> RedisAddress:
    """Parses a Redis URL. Raises ConfigError with the reason and the accepted forms, without quoting secrets."""
    found = _URL.fullmatch(url)
    if found is None or found["scheme"] not in REDIS_SCHEMES:
        raise _bad("is malformed")
    scheme, options = found["scheme"], _options(found["scheme"], found["query"] or "")
    username, password = (unquote(found[name] or "") or None for name in ("username", "password"))
    path = unquote(found["path"] or "")
    if scheme == "unix":
        if found["hosts"] or not path:
            raise _bad("needs an absolute path: unix:///path/to/socket")
        return RedisAddress(
            path=path,
            db=_number(options.pop("db", "0")),
            options=options,
            username=username,
            password=password,
        )
    by_sentinel, steps = scheme.endswith("+sentinel"), [step for step in path.split("/") if step]
    hosts = found["hosts"].split(",")
    if by_sentinel and not steps:
        raise _bad("names no service, which Sentinels need: …host:port/service")
    if not by_sentinel and len(hosts) > 1:
        raise _bad("names several servers, which needs Sentinels and the scheme redis+sentinel")
    service = steps.pop(0) if by_sentinel else None
    return RedisAddress(
        hosts=tuple(_host(host, SENTINEL_PORT if by_sentinel else REDIS_PORT) for host in hosts),
        service=service,
        db=_number("/".join(steps) or "0"),
        tls=scheme.startswith("rediss"),
        options=options,
        username=username,
        password=password,
    )


def _host(text: str, default_port: int) -> tuple[str, int]:
    """Parses `host`, `host:port` or `[v6]:port`. Errors do not quote it, as it may be the rest of a password."""
    found = _HOST.fullmatch(text)
    port = default_port if found is None else int(found["port"] or default_port)
    if found is None or not 0 < port < 65536:
        raise _bad("needs a host, and a port from 1 to 65535")
    return found["v6"] or found["name"], port


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise _bad("needs a number as its database")
    return int(text)


def _options(scheme: str, query: str) -> dict[str, str]:
    allowed: tuple[str, ...] = ("db",) if scheme == "unix" else ()
    allowed += TLS_OPTIONS if scheme.startswith("rediss") else ()
    allowed += SENTINEL_OPTIONS if scheme.endswith("+sentinel") else ()
    options = dict(parse_qsl(query, keep_blank_values=True))
    if (query and not options) or options.keys() - set(allowed):
        raise _bad(f"has an option other than {', '.join(allowed) or 'none'} after the ?")
    return options


def _bad(what: str) -> ConfigError:
    return ConfigError(f"the registry's URL {what}; write {REDIS_URL_FORMS}")
