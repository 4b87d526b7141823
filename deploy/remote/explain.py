"""`moonserve explain ID`: why a request went where it went, and what then happened.

Asks the gateway, which knows the names that clients give to requests. Owns the arguments and the exit code; the
tables are `explanation`'s.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from deploy.remote.explanation import show
from deploy.terminal.endings import EXIT_OK, EXIT_USAGE, KEY_ENV, exit_code, explained
from deploy.terminal.gateway_view import add_url, fetch
from deploy.terminal.output import Output
from protocol.errors import MoonserveError

_TIMEOUT_S = 30.0  # the gateway asks the conductors and the workers


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `explain`."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    output = Output("explain", as_json=arguments.json)
    try:
        path = f"/v1/requests/{quote(arguments.id, safe='')}/explain"
        key = environ.get(KEY_ENV, "")
        explanation = fetch(arguments.url, path, key, timeout_s=_TIMEOUT_S)
    except MoonserveError as error:
        output.problem(explained(error))
        return exit_code(error)
    output.record(**explanation)
    show(explanation, output)
    return EXIT_OK


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve explain",
        description="Shows every candidate of a request's placements, what was chosen, and what then happened.",
        epilog=f"The API key is read from {KEY_ENV}. exit codes: 0 explained; 1 not known; 2 usage or wrong key; "
        "3 no gateway, conductor or worker could be reached",
    )
    parser.add_argument("id", help="the `id` of a reply's body, or its header x-request-id")
    add_url(parser, environ)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
