"""What commands on a running cluster share: requests to its gateway, calls to its workers, tables and JSON lines, and
exit codes.

stdout has only results, so it can be piped; problems go to stderr.
"""

import contextlib
import json
import sys
import urllib.error
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any, TextIO

from moonserve.protocol.errors import ConfigError, InvalidRequest, MoonserveError, NoWorker, PeerError, Unauthenticated
from moonserve.protocol.process.progress_bars import ProgressBars
from moonserve.protocol.process.tls import Certificates, files_in, load_certificates

EXIT_OK = 0
EXIT_NOT_FOUND = 1  # not found; also found corrupt, or not done in full
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3  # a process or the registry was not reached; the answers of the others were printed

KEY_ENV = "MOONSERVE_API_KEY"
TOKEN_ENV = "MOONSERVE_CLUSTER_TOKEN"


class NotFound(MoonserveError):
    """The gateway answered 404."""


def error_text(error: MoonserveError) -> str:
    """Describes an error in one line and names the secret to set if authentication failed."""
    if isinstance(error, Unauthenticated) and KEY_ENV not in error.message:
        return f"{error.message}; set {TOKEN_ENV} to the cluster's"
    return error.message if isinstance(error, PeerError) else str(error)


def run(parser: ArgumentParser, argv: Sequence[str], body: Callable[[Namespace], int]) -> int:
    """Parses the arguments, runs `body` with them, prints a MoonserveError to stderr, and returns the exit code."""
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit:  # argparse has printed the error or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    try:
        return body(arguments)
    except MoonserveError as error:
        print(f"{parser.prog}: {error_text(error)}", file=sys.stderr)
        return exit_code(error)


def exit_code(error: MoonserveError) -> int:
    """Returns the exit code of a command that ends with this error."""
    if isinstance(error, Unauthenticated | ConfigError | InvalidRequest):
        return EXIT_USAGE
    return EXIT_NOT_FOUND if isinstance(error, NoWorker | NotFound) else EXIT_UNREACHABLE


DEFAULT_URL = "http://127.0.0.1:8000"
URL_ENV = "MOONSERVE_URL"
_TIMEOUT_S = 10.0
# HTTPException: another protocol, or an incomplete answer; ValueError: invalid URL or invalid JSON.
_NO_ANSWER = (OSError, HTTPException, ValueError)


def add_url_option(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Adds the `--url` option, the address of the gateway."""
    parser.add_argument("--url", default=environ.get(URL_ENV, DEFAULT_URL), help="address of the gateway")


def cluster_view(url: str, api_key: str) -> dict[str, Any]:
    """Returns the answer to `GET /v1/cluster`. Raises the errors of `fetch`."""
    return fetch(url, "/v1/cluster", api_key)


def fetch(url: str, path: str, api_key: str, *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Returns a JSON object from the gateway. Blocks. Raises the errors of `open_reply`."""
    with open_reply(url, path, api_key, timeout_s=timeout_s) as reply:
        view: dict[str, Any] = json.load(reply)
        return view


@contextlib.contextmanager
def open_reply(
    url: str, path: str, api_key: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _TIMEOUT_S
) -> Iterator[HTTPResponse]:
    """Opens the gateway's reply to a GET, or to a POST of `body`. Raises Unauthenticated for a wrong key, NotFound for
    a 404, MoonserveError if there is no answer, it breaks off within the block, or has another error status."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    headers |= {"content-type": "application/json"} if body else {}
    data = json.dumps(body).encode() if body else None
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            yield reply
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, error) from error
    except _NO_ANSWER as error:
        raise _no_answer(url, error) from error


def _refused(url: str, error: urllib.error.HTTPError) -> MoonserveError:
    """Converts an error reply, with the gateway's own message if there is one. Reads the reply's body."""
    if error.code == 401:
        return Unauthenticated(f"wrong API key; set {KEY_ENV}")
    try:
        message = str(json.load(error)["error"]["message"])
    except (*_NO_ANSWER, KeyError, TypeError):
        return _no_answer(url, error)
    return NotFound(message) if error.code == 404 else MoonserveError(message)


def _no_answer(url: str, error: Exception) -> MoonserveError:
    # repr: a reply in another protocol is part of the text, and its control characters would move the cursor.
    why = repr(error) if isinstance(error, HTTPException) else error
    return MoonserveError(f"no answer from {url}: {why}; give the gateway's address with --url")


CALL_TIMEOUT_S = 10.0
POLL_S = 0.2


def credentials(environ: Mapping[str, str]) -> tuple[str, Certificates | None]:
    """Returns the cluster's token and the certificates that the environment names. Raises ConfigError."""
    files = files_in(environ)
    return environ.get(TOKEN_ENV, ""), None if files is None else load_certificates(files)


def find_instance(instances: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Returns the instance with this id from a gateway's list, or None."""
    return next((each for each in instances if each["instance_id"] == name), None)


def require_other_worker_of_role(
    leaving: Mapping[str, Any], instances: Sequence[Mapping[str, Any]], remedy: str
) -> None:
    """Raises InvalidRequest if no other worker has the role of the leaving one. `remedy`: what to do first."""
    role = leaving["role"]
    if sum(each["role"] == role and not each["draining"] for each in instances) < 2:
        raise InvalidRequest(
            f"{leaving['instance_id']} is the only {role} worker; without one, requests wait and fail. {remedy}, "
            "or insist with --force"
        )


def add_worker_options(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """Adds the options `--url`, `--force` and `--no-wait`."""
    add_url_option(parser, environ)
    parser.add_argument("--force", action="store_true", help="also if it is the only worker of its role")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")


# -- output

SHORT_KEY_DIGITS = 16
_BAR_CELLS = 10
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Output:
    """Output of one command. `command`: its name, for example `kvctl`. With `as_json`, `line` and `header` print
    nothing; otherwise `record` does. `long`: keys are not shortened to 16 of their 32 hex digits."""

    def __init__(
        self,
        command: str,
        *,
        as_json: bool = False,
        long: bool = False,
        stdout: TextIO | None = None,
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.long = long
        self.stdout = stdout or sys.stdout
        self.is_terminal = self.stdout.isatty()

    def line(self, text: str = "") -> None:
        if not self.as_json:
            print(text, file=self.stdout, flush=True)

    def record(self, **fields: Any) -> None:
        """Prints a line of JSON if `as_json`."""
        if self.as_json:
            print(json.dumps(fields), file=self.stdout, flush=True)

    def note(self, text: str) -> None:
        """Prints a line for people to stderr, in both modes."""
        print(text, file=sys.stderr, flush=True)

    def problem(self, text: str) -> None:
        self.note(f"moonserve {self.command}: {text}")

    def key(self, key: bytes) -> str:
        digits = key.hex()
        return digits if self.long else digits[:SHORT_KEY_DIGITS]

    def progress(self) -> ProgressBars:
        """Returns the progress display of a long operation, a context manager: bars for people, lines for programs."""
        return ProgressBars(sys.stderr, bars=not self.as_json)

    def header(self, text: str) -> None:
        self.line(f"{_DIM}{text}{_PLAIN}" if self.is_terminal else text)


class Table:
    """Table that is printed in portions. Columns only grow wider. A `>` before a column's name aligns it right."""

    def __init__(self, output: Output, *columns: str) -> None:
        self._output = output
        self._names = [name.removeprefix(">") for name in columns]
        self._is_right = [name.startswith(">") for name in columns]
        self._widths = [len(name) for name in self._names]
        self._rows: list[Sequence[str]] = []
        self._has_header = False

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def flush(self) -> None:
        """Prints the rows added since the last call, after the header if these are the first."""
        for row in self._rows:
            self._widths = [max(w, len(c)) for w, c in zip(self._widths, row, strict=True)]
        if self._rows and not self._has_header:
            self._output.header(self._format(self._names))
            self._has_header = True
        for row in self._rows:
            self._output.line(self._format(row))
        self._rows = []

    def _format(self, cells: Sequence[str]) -> str:
        columns = zip(cells, self._widths, self._is_right, strict=True)
        texts = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns]
        return "  ".join(texts).rstrip()


def bar(share: float) -> str:
    """Formats a share as `███░░░░░░░`. A share above 0 fills at least one cell."""
    share = min(max(share, 0.0), 1.0)
    full = round(share * _BAR_CELLS) or (1 if share > 0 else 0)
    return "█" * full + "░" * (_BAR_CELLS - full)


def count(number: int, noun: str) -> str:
    """Formats a number with its noun: `1 object`, `2,000 objects`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """Formats bytes as `3.2 GiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Formats bytes per second as `12.34 GB/s`."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"
