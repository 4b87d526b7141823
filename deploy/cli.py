"""The `moonserve` command: one verb per line of `VERBS`, imported only when it is called for."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

EXIT_USAGE = 2
EXIT_PIPE = 128 + 13  # as a shell reports a program that SIGPIPE ended

# verb → (module, function taking the remaining arguments, one line of help)
VERBS: dict[str, tuple[str, str, str]] = {
    "serve": ("deploy.serve", "main", "run a whole cluster on this machine: serve [MODEL]"),
    "gateway": ("gateway.__main__", "main", "run the OpenAI-compatible HTTP endpoint"),
    "conductor": ("conductor.__main__", "main", "run the global scheduler"),
    "deploy": ("deploy.ray.command", "main", "run a cluster on Ray: deploy ray FILE | status | …"),
    "worker": ("deploy.cli", "worker", "run a worker: --role prefill|decode"),
    "role": (
        "deploy.remote.role",
        "main",
        "change a running worker's role: role INSTANCE prefill|decode",
    ),
    "drain": (
        "deploy.remote.drain",
        "main",
        "take a running worker or store node out of service: drain ID",
    ),
    "store": ("kvstore.__main__", "main", "run a KV store node"),
    "directory": ("kvstore.directory.__main__", "main", "run the index over all KV store nodes"),
    "kvctl": ("deploy.kvctl.main", "main", "look into a running KV store, and operate it; limits"),
    "keys": ("deploy.keys", "main", "API keys: keys add | list | revoke | hash"),
    "explain": ("deploy.remote.explain", "main", "why a request went where it went: explain ID"),
    "top": ("deploy.remote.top", "main", "the cluster live: queues, latencies, caches, transfers"),
    "chat": (
        "deploy.remote.chat",
        "main",
        "talk to the model, with what each answer took: chat [PROMPT]",
    ),
    "doctor": ("deploy.doctor.command", "main", "examine this machine, its transports and a peer"),
    "profile": (
        "deploy.profile.command",
        "main",
        "measure a model on this machine: profile [MODEL]",
    ),
    "replay": ("traces.replay", "main", "send a trace to an endpoint on its own clock"),
    "simulate": ("traces.simulator.command", "main", "a cluster in virtual time: simulate TRACE"),
    "plan": ("traces.planner.command", "main", "the cluster that a trace needs: plan TRACE"),
    "reproduce": (
        "traces.reproduction.command",
        "main",
        "published figures again: reproduce TRACE",
    ),
    "traces": ("traces.cli", "main", "traces of requests: traces fetch | analyze | synthesize"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the verb that comes first in `argv` and returns its exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough: `moonserve … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return EXIT_PIPE
    return code


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"moonserve {importlib.metadata.version('moonserve')}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        close = get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; see moonserve --help"
        print(f"moonserve: unknown verb {verb!r}{hint}", file=sys.stderr)
        return EXIT_USAGE
    module, function, _ = VERBS[verb]
    run: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return run(rest)


def worker(argv: list[str]) -> int:
    """`moonserve worker --role prefill|decode [--role-switching on | --conditional-disaggregation on] …`."""
    modules = {"prefill": "prefill_worker.__main__", "decode": "decode_worker.__main__"}
    switching, rest = _take(argv, "--role-switching")
    if switching == "on":
        switching_worker: Callable[[list[str]], int]
        switching_worker = importlib.import_module("deploy.worker.__main__").main
        return switching_worker(rest)
    if switching not in (None, "off"):
        print("moonserve worker: --role-switching is on or off", file=sys.stderr)
        return EXIT_USAGE
    role, rest = _take(rest, "--role")
    conditional, rest = _take(rest, "--conditional-disaggregation")
    if conditional not in (None, "off", "on"):
        print("moonserve worker: --conditional-disaggregation is on or off", file=sys.stderr)
        return EXIT_USAGE
    if conditional == "on":
        modules["decode"] = "deploy.undivided.__main__"
    if role not in modules:
        print("moonserve worker: --role prefill or --role decode must be given", file=sys.stderr)
        return EXIT_USAGE
    run: Callable[[list[str]], int] = importlib.import_module(modules[role]).main
    return run(rest)


def _take(argv: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag, if it is there, and the other arguments."""
    for position, argument in enumerate(argv):
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}="), argv[:position] + argv[position + 1 :]
        if argument == flag and position + 1 < len(argv):
            return argv[position + 1], argv[:position] + argv[position + 2 :]
    return None, argv


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {text}" for verb, (_, _, text) in VERBS.items()]
    return "\n".join(["usage: moonserve VERB [options]", "", *lines, "", "moonserve VERB --help"])
