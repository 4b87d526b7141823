"""`moonserve kvctl`: selects the verb and the cluster, and returns the exit code."""

from __future__ import annotations

import asyncio
import os
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence

from deploy.kvctl import drain, limit, modify, show
from deploy.kvctl.cluster import Cluster, require_target
from deploy.terminal.client import (
    DEFAULT_URL,
    EXIT_INTERRUPTED,
    TOKEN_ENV,
    URL_ENV,
    credentials,
    run,
)
from deploy.terminal.output import Output
from protocol.errors import ConfigError
from protocol.registry.connect import connect

VERBS = (
    *(show.add_ls, show.add_stat, show.add_nodes),
    *(modify.add_replicas, modify.add_pin, modify.add_drop, modify.add_verify),
    *(drain.add_to, limit.add_to),
)
REGISTRY_ENV = "MOONSERVE_REGISTRY"

_EPILOG = f"""\
The cluster's registry is --registry or {REGISTRY_ENV}: redis://…, redis+sentinel://…, or host:port of a directory.
limits and limit need none: they ask the gateway, --url or {URL_ENV}.
The cluster's secret is read from {TOKEN_ENV}, with TLS the files from MOONSERVE_TLS_CERTIFICATE, …_KEY and …_AUTHORITY.
exit codes: 0 done; 1 not found, found corrupt or not done in full; 2 usage or wrong token; 3 a node or the registry
could not be reached
"""


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `kvctl`."""

    def body(arguments: Namespace) -> int:
        output = Output("kvctl", as_json=arguments.json, long=arguments.long)
        try:
            return asyncio.run(_run(arguments, output, environ))
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return run(_parser(), argv, body)


async def _run(arguments: Namespace, output: Output, environ: Mapping[str, str]) -> int:
    url = arguments.registry or environ.get(REGISTRY_ENV) or None
    if arguments.asks_stores:
        if arguments.url is not None:
            raise ConfigError("--url is for limits and limit: store nodes are found by --registry or --node")
        require_target(url, arguments.nodes)
    elif arguments.url is None:
        arguments.url = environ.get(URL_ENV, DEFAULT_URL)
    token, tls = credentials(environ)
    registry = None
    if url and arguments.asks_stores:
        registry = connect(url, cluster_token=token, tls=tls)
    cluster = Cluster(registry, arguments.nodes, token, tls)
    try:
        code: int = await arguments.run(arguments, cluster, output)
        return code
    finally:
        await cluster.close()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve kvctl",
        description="Looks into a running KV store, and operates it; limits what workers' KV takes of memory.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    _add_common(parser)
    parser.set_defaults(registry=None, nodes=[], url=None, json=False, long=False)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    # The same options are valid after the verb. If absent there, they must not reset those before the verb.
    common = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    _add_common(common)
    for add in VERBS:
        add(verbs, common)
    return parser


def _add_common(parser: ArgumentParser) -> None:
    # The options have no default of their own, so the parser's default applies.
    parser.add_argument("--registry", metavar="URL", help="where the cluster is")
    parser.add_argument(
        "--node",
        metavar="NODE",
        dest="nodes",
        action="append",
        help="only this node, by id, or by HOST:PORT without asking a registry; may be repeated",
    )
    parser.add_argument("--url", help="of the gateway, for limits and limit")
    parser.add_argument("--json", action="store_const", const=True, help="print JSON lines")
    parser.add_argument("--long", action="store_const", const=True, help="whole keys, all columns")
