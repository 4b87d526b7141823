"""The `moonserve traces` command line: fetch, analyze, synthesize. A verb's module is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from protocol.config import EXIT_CONFIG

# verb → (module with `main(arguments after the verb) -> exit code`, one line of help)
VERBS = {
    "fetch": ("traces.fetch", "download the public traces: fetch [--into FOLDER]"),
    "analyze": ("traces.analysis.command", "measure a trace: analyze TRACE [--json F]"),
    "synthesize": ("traces.synthesis.command", "make one: synthesize --out FILE [--like TRACE]"),
}


def main(argv: Sequence[str]) -> int:
    """Runs the verb in `argv`, the arguments after `traces`. Returns 2 if the user has to correct the arguments."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else EXIT_CONFIG
    verb = argv[0]
    if verb not in VERBS:
        close = get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(VERBS)}"
        print(f"moonserve traces: unknown verb {verb!r}; {hint}", file=sys.stderr)
        return EXIT_CONFIG
    run: Callable[[Sequence[str]], int] = importlib.import_module(VERBS[verb][0]).main
    return run(argv[1:])


def _usage() -> str:
    lines = [f"  {verb:10}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(["usage: moonserve traces VERB [options]", "", *lines])
