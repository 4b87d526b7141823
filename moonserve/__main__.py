"""The `moonserve` command: one verb per line of `VERBS`. A verb's module is imported only when the verb is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from protocol import process

EXIT_USAGE = 2
EXIT_PIPE = 128 + 13  # a shell's exit code for a program that SIGPIPE ended

# verb → (function taking the remaining arguments, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "serve": ("deploy.serve:main", "run a whole cluster on this machine: serve [MODEL]"),
    "gateway": ("", "run the OpenAI-compatible HTTP endpoint"),
    "conductor": ("", "run the global scheduler"),
    "deploy": ("deploy.ray.command:main", "run a cluster on Ray: deploy ray FILE | status | …"),
    "worker": ("", "run a worker: --role prefill|decode"),
    "role": ("deploy.remote.workers:role", "change a worker's role: role ID prefill|decode"),
    "drain": ("deploy.remote.workers:drain", "take a worker or store node out of service"),
    "store": ("", "run a KV store node"),
    "directory": ("", "run the index over all KV store nodes"),
    "kvctl": ("deploy.kvctl.main:main", "look into a running KV store, and operate it; limits"),
    "keys": ("deploy.keys:main", "API keys: keys add | list | revoke | hash"),
    "explain": ("deploy.remote.explain:main", "why a request went where it went: explain ID"),
    "top": ("deploy.remote.top:main", "the cluster live: queues, latencies, caches, transfers"),
    "doctor": ("deploy.doctor.command:main", "examine this machine, its transports and a peer"),
    "profile": ("deploy.profile.command:main", "measure a model here: profile [MODEL]"),
    "replay": ("traces.replay:main", "send a trace to an endpoint on its own clock"),
    "simulate": ("traces.simulator.command:main", "a cluster in virtual time: simulate TRACE"),
    "plan": ("traces.planner.command:main", "the cluster that a trace needs: plan TRACE"),
    "reproduce": ("traces.reproduction.command:main", "published figures: reproduce TRACE"),
    "traces": ("traces.cli:main", "traces of requests: traces fetch | analyze | synthesize"),
}

# command line of a server process → (its configuration, its coroutine). The last two are started by their leaders.
SERVERS: dict[str, tuple[str, str]] = {
    "gateway": ("gateway.config:GatewayConfig", "gateway.server:serve"),
    "conductor": ("conductor.config:ConductorConfig", "conductor.service:serve"),
    "store": ("kvstore.config:StoreConfig", "kvstore.node:serve"),
    "directory": ("kvstore.directory.config:DirectoryConfig", "kvstore.directory.serve:serve"),
    "worker --role prefill": ("prefill_worker.config:PrefillConfig", "prefill_worker.worker:serve"),
    "worker --role decode": ("decode_worker.config:DecodeConfig", "decode_worker.worker:serve"),
    "worker --role-switching on": ("deploy.worker.config:WorkerConfig", "deploy.worker.worker:serve"),
    "worker --role decode --conditional-disaggregation on": (
        "deploy.undivided.config:UndividedConfig",
        "deploy.undivided.worker:serve",
    ),
    "pipeline-stage": ("prefill_worker.pipeline.follower:FollowerConfig", "prefill_worker.pipeline.follower:serve"),
    "tensor-parallel-rank": ("engine.tensor_parallel.rank:RankConfig", "engine.tensor_parallel.rank:serve"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the verb that is the first item of `argv` and returns its exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe: `moonserve … | head`
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
    if verb == "worker":
        return worker(rest)
    if verb in SERVERS:
        return _serve(verb, rest)
    if verb not in VERBS:
        close = get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; see moonserve --help"
        print(f"moonserve: unknown verb {verb!r}{hint}", file=sys.stderr)
        return EXIT_USAGE
    return int(load(VERBS[verb][0])(rest))


def load(place: str) -> Any:
    """Imports what `place` names, as `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _serve(command: str, arguments: list[str]) -> int:
    """Runs the server process of `command` with the other `arguments`."""
    config, serve = SERVERS[command]
    return process.main(load(config), load(serve), arguments, prog=f"moonserve {command}")


def worker(argv: list[str]) -> int:
    """Runs `moonserve worker --role prefill|decode [--role-switching on | --conditional-disaggregation on] …`."""
    parser = ArgumentParser(prog="moonserve worker", add_help=False, allow_abbrev=False)
    parser.add_argument("--role", choices=("prefill", "decode"))
    for flag in ("--role-switching", "--conditional-disaggregation"):
        parser.add_argument(flag, choices=("off", "on"), default="off")
    try:
        known, rest = parser.parse_known_args(argv)
        if known.role_switching == "on":
            command = "worker --role-switching on"
            rest += ["--role", known.role] if known.role else []
        elif known.role is None:
            parser.error("--role prefill or --role decode must be given")
        elif known.role == "decode" and known.conditional_disaggregation == "on":
            command = "worker --role decode --conditional-disaggregation on"
        else:
            command = f"worker --role {known.role}"
    except SystemExit:  # argparse has printed the error
        return EXIT_USAGE
    return _serve(command, rest)


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:{width}}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(["usage: moonserve VERB [options]", "", *lines, "", "moonserve VERB --help"])


if __name__ == "__main__":
    sys.exit(main())
