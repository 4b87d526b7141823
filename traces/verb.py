"""A verb of the command line that takes a trace: options from flags, environment and file, one line for what is wrong.

Owns the exit codes. Knows nothing of what the verb does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.config import HelpRequested, load
from protocol.errors import ConfigError
from protocol.process import EXIT_CONFIG

EXIT_INTERRUPTED = 130  # as a shell has it

C = TypeVar("C")


def run_verb(
    prog: str,
    config: type[C],
    run: Callable[[C], int],
    argv: Sequence[str],
    *,
    interrupted: str | None = None,
) -> int:
    """The exit code. `argv`: the arguments after the verb; the first one may be the trace. `interrupted`: what Ctrl-C
    leaves behind; None: KeyboardInterrupt is raised."""
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[0:1] = ["--trace", arguments[0]]
    try:
        return run(load(config, arguments, prog=prog, environ=os.environ))
    except HelpRequested as request:
        print(request)
        return 0
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        print(f"{prog}: interrupted; {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
