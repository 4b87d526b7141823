"""`moonserve explain ID`: why a request went where it went, and what then happened.

Asks the gateway, which knows the names that clients give to requests. Owns the arguments and the exit code; the
tables are `deploy.explanation`'s.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from deploy.explanation import show
from deploy.kvctl.output import EXIT_NOT_FOUND, EXIT_OK, EXIT_UNREACHABLE, EXIT_USAGE, Output

DEFAULT_URL = "http://127.0.0.1:8000"
URL_ENV = "MOONSERVE_URL"
KEY_ENV = "MOONSERVE_API_KEY"
_TIMEOUT_S = 30.0
_EXIT_CODES = {401: EXIT_USAGE, 404: EXIT_NOT_FOUND}


class Refused(Exception):
    """The gateway's answer, or that there was none, and the exit code that follows from it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `explain`."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    output = Output(as_json=arguments.json)
    try:
        explanation = fetch(arguments.url, arguments.id, environ.get(KEY_ENV, ""))
    except Refused as refusal:
        output.note(f"moonserve explain: {refusal}")
        return refusal.exit_code
    output.record(**explanation)
    show(explanation, output)
    return EXIT_OK


def fetch(url: str, request_id: str, api_key: str) -> dict[str, Any]:
    """The body of `GET /v1/requests/{id}/explain`. Raises Refused."""
    address = f"{url.rstrip('/')}/v1/requests/{quote(request_id, safe='')}/explain"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            explanation: dict[str, Any] = json.load(response)
            return explanation
    except urllib.error.HTTPError as error:
        raise _refused(error) from error
    except (OSError, ValueError) as error:  # ValueError: no URL, or no JSON
        message = f"no answer from {url}: {error}; give the gateway's address with --url"
        raise Refused(message, EXIT_UNREACHABLE) from error


def _refused(error: urllib.error.HTTPError) -> Refused:
    with error:
        try:
            message = str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"{error.url} answers {error.code} {error.reason}"
    if error.code == 401:
        message += f"; set {KEY_ENV}"
    return Refused(message, _EXIT_CODES.get(error.code, EXIT_UNREACHABLE))


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve explain",
        description="Shows every candidate of a request's placements, what was chosen, and what then happened.",
        epilog=f"The API key is read from {KEY_ENV}. exit codes: 0 explained; 1 not known; 2 usage or wrong key; "
        "3 no gateway, conductor or worker could be reached",
    )
    parser.add_argument("id", help="the `id` of a reply's body, or its header x-request-id")
    parser.add_argument("--url", default=environ.get(URL_ENV, DEFAULT_URL), help="of the gateway")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
