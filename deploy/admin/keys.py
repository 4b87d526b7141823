"""`moonserve keys add | list | revoke | hash`: manages the API keys in a file or in the registry.

A key is shown once, when it is created; only its hash is stored.
"""

import asyncio
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from moonserve.deploy.terminal import EXIT_NOT_FOUND, EXIT_OK, Output, Table, run
from moonserve.gateway.access.api_key import ApiKey, KeyLimits, check_strength, digest_of, new_key
from moonserve.gateway.access.key_file import KeyFile
from moonserve.gateway.access.key_table import KeyStore
from moonserve.protocol.errors import ConfigError, InvalidRequest

FILE_ENV = "MOONSERVE_API_KEY_FILE"
REGISTRY_ENV = "MOONSERVE_REGISTRY"


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `keys`."""
    return run(_parser(environ), argv, lambda arguments: asyncio.run(_run(arguments)))


async def _run(arguments: Namespace) -> int:
    output = Output("keys", as_json=arguments.json)
    if arguments.verb == "hash":  # for keys that another system writes into the file
        record = _record(arguments, _presented())
        output.record(**record.to_json())
        output.line(record.digest)
        return EXIT_OK
    store = _store(arguments)
    try:
        match arguments.verb:
            case "add":
                return await _add(arguments, store, output)
            case "list":
                return await _list(store, output)
            case _:
                return await _revoke(arguments, store, output)
    finally:
        await store.close()


def _store(arguments: Namespace) -> KeyStore:
    """Opens the file or the registry. Raises ConfigError unless exactly one of them is given."""
    if arguments.file and arguments.in_registry:
        raise ConfigError("keys are either in --file or in the --registry")
    if arguments.in_registry:
        if not arguments.registry:
            raise ConfigError(f"give the Redis with --registry, or in {REGISTRY_ENV}")
        from moonserve.gateway.access.redis_stores import RedisKeyStore  # imports redis

        return RedisKeyStore(arguments.registry)
    if not arguments.file:
        raise ConfigError(f"give the file with --file, or in {FILE_ENV}; or --in-registry")
    return KeyFile(Path(arguments.file))


async def _add(arguments: Namespace, store: KeyStore, output: Output) -> int:
    key = _presented() if arguments.stdin else new_key()
    record = _record(arguments, key)
    await store.add(record)
    shown = {} if arguments.stdin else {"key": key}
    output.record(key_id=record.key_id, **shown)
    if not arguments.stdin and not arguments.json:
        output.note("This is the only time that the key is shown.")
        output.line(key)
    return EXIT_OK


async def _list(store: KeyStore, output: Output) -> int:
    numbers = (">priority", ">requests/min", ">tokens/min", ">streams")
    table = Table(output, "key id", "tenant", *numbers, "made", "note")
    for key in sorted(await store.all(), key=lambda key: (key.tenant, key.created, key.key_id)):
        told = {name: value for name, value in key.to_json().items() if name != "digest"}
        output.record(key_id=key.key_id, **told)
        limits = key.limits
        figures = (limits.requests_per_minute, limits.tokens_per_minute, limits.streams)
        shown = ("–" if number is None else f"{number:,}" for number in (key.priority, *figures))
        table.add(key.key_id, key.tenant or "–", *shown, key.created or "–", key.note)
    table.flush()
    return EXIT_OK


async def _revoke(arguments: Namespace, store: KeyStore, output: Output) -> int:
    if await store.revoke(arguments.key_id):
        output.record(revoked=arguments.key_id)
        output.note("Gateways refuse it within two seconds.")
        return EXIT_OK
    output.problem(f"there is no key {arguments.key_id}; see `moonserve keys list`")
    return EXIT_NOT_FOUND


def _presented() -> str:
    """Reads a key from stdin, because process lists and shell histories show arguments. Raises InvalidRequest."""
    try:
        key = sys.stdin.readline().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest("standard input is not text: a key consists of printable ASCII characters") from error
    check_strength(key)
    return key


def _record(arguments: Namespace, key: str) -> ApiKey:
    return ApiKey(
        digest=digest_of(key.encode()),
        tenant=arguments.tenant,
        priority=arguments.priority,
        limits=KeyLimits(
            requests_per_minute=arguments.requests_per_minute,
            tokens_per_minute=arguments.tokens_per_minute,
            streams=arguments.streams,
        ),
        note=arguments.note,
        created=datetime.now(UTC).date().isoformat(),
    )


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve keys",
        description="API keys of a cluster, in a file (--api-key-file of gateways) or in the Redis of --registry "
        "(--api-keys-in-registry).",
        epilog="exit codes: 0 done; 1 no such key; 2 usage, or a file that holds no keys; 3 no Redis could be reached",
    )
    common = ArgumentParser(add_help=False)
    common.add_argument("--file", default=environ.get(FILE_ENV), help=f"file of keys; {FILE_ENV} when not given")
    common.add_argument("--in-registry", action="store_true", help="the keys are in the registry")
    common.add_argument(
        "--registry", default=environ.get(REGISTRY_ENV), help=f"redis://…; {REGISTRY_ENV} when not given"
    )
    common.add_argument("--json", action="store_true", help="print JSON")
    about = ArgumentParser(add_help=False)
    about.add_argument("--tenant", default="", help="tenant of the key; none when not given")
    about.add_argument("--priority", type=int, help="most urgent priority that its requests may have")
    for name in ("requests-per-minute", "tokens-per-minute", "streams"):
        about.add_argument(f"--{name}", type=int, help="limit of this key; the gateway's when not given")
    about.add_argument("--note", default="", help="comment for people")
    verbs = parser.add_subparsers(dest="verb", required=True)
    add = verbs.add_parser("add", parents=[common, about], help="make a key and show it once")
    add.add_argument("--stdin", action="store_true", help="take the key from standard input")
    verbs.add_parser("list", parents=[common], help="list keys with their tenants and limits")
    revoke = verbs.add_parser("revoke", parents=[common], help="revoke a key")
    revoke.add_argument("key_id", help="as `list` shows it")
    verbs.add_parser("hash", parents=[common, about], help="print the record of a key from standard input")
    return parser
