"""`moonserve top`: the cluster live, in the terminal. Asks the gateway once a second; Ctrl-C ends it.

Owns the arguments, the clock and the exit code; what is shown is `top_view`'s. Where nobody looks, as in a pipe, it
shows one moment and ends.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deploy.remote.top_view import Moment, shown
from deploy.terminal.endings import EXIT_USAGE, KEY_ENV, exit_code, explained
from deploy.terminal.gateway_view import add_url, cluster_view, figures
from protocol.errors import MoonserveError, Unauthenticated

_LEAST_INTERVAL_S = 0.2


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `top`."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    console = Console(highlight=False)
    key = environ.get(KEY_ENV, "")
    try:
        earlier = _look(arguments.url, key)
        if arguments.once or not console.is_terminal:
            console.print(shown(earlier, None))
            return 0
        _follow(console, arguments.url, key, max(arguments.interval, _LEAST_INTERVAL_S), earlier)
    except KeyboardInterrupt:
        return 0
    except MoonserveError as error:
        print(f"moonserve top: {explained(error)}", file=sys.stderr)
        return exit_code(error)
    return 0


def _look(url: str, key: str) -> Moment:
    return Moment(cluster=cluster_view(url, key), figures=figures(url, key))


def _follow(console: Console, url: str, key: str, interval_s: float, earlier: Moment) -> None:
    """Until interrupted. A gateway that is away for a while is waited for."""
    with Live(shown(earlier, None), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = _look(url, key)
            except Unauthenticated:
                raise
            except MoonserveError as error:
                live.update(Text(f"{error}; trying again", style="red"), refresh=True)
                continue
            live.update(shown(now, earlier), refresh=True)
            earlier = now


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve top",
        description="Shows instances, queues, latencies, caches and transfers, live. Ctrl-C ends it.",
        epilog=f"The API key is read from {KEY_ENV}. exit codes: 0 shown; 2 usage or wrong key; 3 no gateway answers",
    )
    add_url(parser, environ)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="one look, then end")
    return parser
