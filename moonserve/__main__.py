"""The `moonserve` command: one verb per line of `VERBS`. A verb's module is imported only when the verb is used."""

import atexit
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from moonserve.protocol.process import lifecycle

EXIT_USAGE = 2
EXIT_PIPE = 128 + 13  # a shell's exit code for a program that SIGPIPE ended

# verb → (function taking the remaining arguments, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "serve": ("moonserve.deploy.launcher.serve:main", "run a whole cluster on this machine: serve [MODEL]"),
    "gateway": ("", "run the OpenAI-compatible HTTP endpoint"),
    "conductor": ("", "run the global scheduler"),
    "deploy": ("moonserve.deploy.ray.command:main", "run a cluster on Ray: deploy ray FILE | status | …"),
    "worker": ("", "run a worker: --role prefill|decode [--engine vllm [--attach URL]]"),
    "role": ("moonserve.deploy.admin.drain_and_role:role", "change a worker's role: role ID prefill|decode"),
    "drain": ("moonserve.deploy.admin.drain_and_role:drain", "take a worker or store node out of service"),
    "store": ("", "run a KV store node"),
    "directory": ("", "run the index over all KV store nodes"),
    "kvctl": ("moonserve.deploy.admin.kvctl:main", "inspect and operate a KV store; memory limits"),
    "keys": ("moonserve.deploy.admin.keys:main", "API keys: keys add | list | revoke | hash"),
    "explain": ("moonserve.deploy.admin.explain:main", "show how a request was placed: explain ID"),
    "top": ("moonserve.deploy.admin.top:main", "the cluster live: queues, latencies, caches, transfers"),
    "chat": ("moonserve.deploy.chat:main", "talk to the model: chat [-q QUESTION]"),
    "doctor": ("moonserve.deploy.diagnostics.doctor:main", "examine this machine, its transports and a peer"),
    "profile": ("moonserve.deploy.diagnostics.profile:main", "measure a model here: profile [MODEL]"),
    "replay": ("moonserve.traces.replay:main", "send a trace to an endpoint on its own clock"),
    "simulate": ("moonserve.traces.experiments.simulate:main", "a cluster in virtual time: simulate TRACE"),
    "plan": ("moonserve.traces.experiments.plan:main", "the cluster that a trace needs: plan TRACE"),
    "traces": ("", "traces of requests: traces fetch | analyze | synthesize"),
}

TRACES_VERBS: dict[str, tuple[str, str]] = {
    "fetch": ("moonserve.traces.workload.fetch:main", "download the public traces: fetch [--into FOLDER]"),
    "analyze": ("moonserve.traces.workload.analyze:main", "measure a trace: analyze TRACE [--json F]"),
    "synthesize": ("moonserve.traces.workload.synthesize:main", "make one: synthesize --out FILE [--like TRACE]"),
}

# command line of a server process → (its configuration, its coroutine). The last two are started by their leaders.
SERVERS: dict[str, tuple[str, str]] = {
    "gateway": ("moonserve.gateway.config:GatewayConfig", "moonserve.gateway.server:serve"),
    "conductor": ("moonserve.conductor.config:ConductorConfig", "moonserve.conductor.service:serve"),
    "store": ("moonserve.kvstore.config:StoreConfig", "moonserve.kvstore.node.process:serve"),
    "directory": ("moonserve.kvstore.directory.config:DirectoryConfig", "moonserve.kvstore.directory.service:serve"),
    "worker --role prefill": ("moonserve.prefill_worker.config:PrefillConfig", "moonserve.prefill_worker.worker:serve"),
    "worker --role decode": ("moonserve.decode_worker.config:DecodeConfig", "moonserve.decode_worker.worker:serve"),
    "worker --role-switching on": (
        "moonserve.decode_worker.role_switching:RoleSwitchingConfig",
        "moonserve.decode_worker.role_switching:serve",
    ),
    "worker --role decode --conditional-disaggregation on": (
        "moonserve.decode_worker.local_prefill.worker:LocalPrefillConfig",
        "moonserve.decode_worker.local_prefill.worker:serve",
    ),
    "worker --engine vllm --role prefill": (
        "moonserve.vllm.serving.config:VllmConfig",
        "moonserve.vllm.serving.worker:serve_prefill",
    ),
    "worker --engine vllm --role decode": (
        "moonserve.vllm.serving.config:VllmConfig",
        "moonserve.vllm.serving.worker:serve_decode",
    ),
    "worker --engine vllm --attach URL --role prefill": (
        "moonserve.vllm.attached.worker:AttachedConfig",
        "moonserve.vllm.attached.worker:serve_prefill",
    ),
    "worker --engine vllm --attach URL --role decode": (
        "moonserve.vllm.attached.worker:AttachedConfig",
        "moonserve.vllm.attached.worker:serve_decode",
    ),
    "pipeline-stage": (
        "moonserve.prefill_worker.pipeline_follower:FollowerConfig",
        "moonserve.prefill_worker.pipeline_follower:serve",
    ),
    "tensor-parallel-rank": (
        "moonserve.engine.tensor_parallel.rank_processes:RankConfig",
        "moonserve.engine.tensor_parallel.rank_processes:serve_rank",
    ),
}

# Verbs that work with the base requirements of pyproject.toml. All others need those of its extra `serve`.
BASE_VERBS = (
    "conductor",
    "store",
    "directory",
    "role",
    "drain",
    "kvctl",
    "keys",
    "explain",
    "top",
    "chat",
    "doctor",
    "traces",
)

SERVE_MODULES = (
    "aiohttp", "fastapi", "httptools", "huggingface_hub", "jinja2", "llguidance", "pydantic", "safetensors",
    "tokenizers", "torch", "transformers", "uvicorn", "yaml",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the verb that is the first item of `argv` and returns its exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe: `moonserve … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return EXIT_PIPE
    return code


def command() -> int:
    """Runs the command line of this process, which ends after all other functions of `atexit`: freeing the modules
    would take 0.3 s of processor time once torch is imported, in each of a cluster's processes."""
    codes: list[int] = []

    def end() -> None:
        if codes:  # no error is on its way
            sys.stdout.flush()
            os._exit(codes[0])

    atexit.register(end)  # the first function to be registered runs last
    codes.append(main())
    return codes[0]


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage("moonserve", VERBS))
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"moonserve {importlib.metadata.version('moonserve')}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    is_base = verb in BASE_VERBS or (verb == "worker" and _is_for_vllm(rest))
    missing = _missing_of_serve() if verb in (VERBS | SERVERS) and not is_base else None
    if missing:
        print(f"moonserve {verb} needs {missing}: pip install 'moonserve[serve]'", file=sys.stderr)
        return EXIT_USAGE
    if verb == "worker":
        return worker(rest)
    if verb == "traces":
        return traces(rest)
    return _serve(verb, rest) if verb in SERVERS else _run_verb("moonserve", VERBS, verb, rest)


def _is_for_vllm(arguments: list[str]) -> bool:
    """Returns True for a worker whose engine is vLLM, in whose environment it runs."""
    return "--engine=vllm" in arguments or ("--engine", "vllm") in pairwise(arguments)


def _missing_of_serve() -> str | None:
    """Returns the first module of the extra `serve` that is not installed, without an import of any."""
    return next((name for name in SERVE_MODULES if importlib.util.find_spec(name) is None), None)


def traces(argv: list[str]) -> int:
    """Runs `moonserve traces VERB …`. Returns 2 if the user has to correct the arguments."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage("moonserve traces", TRACES_VERBS), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else EXIT_USAGE
    return _run_verb("moonserve traces", TRACES_VERBS, argv[0], argv[1:])


def _run_verb(command: str, verbs: dict[str, tuple[str, str]], verb: str, arguments: list[str]) -> int:
    if verb not in verbs:
        close = get_close_matches(verb, verbs, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; see {command} --help"
        print(f"{command}: unknown verb {verb!r}{hint}", file=sys.stderr)
        return EXIT_USAGE
    return int(load(verbs[verb][0])(arguments))


def load(place: str) -> Any:
    """Imports what `place` names, as `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _serve(command: str, arguments: list[str]) -> int:
    """Runs the server process of `command` with the other `arguments`."""
    config, serve = SERVERS[command]
    return lifecycle.main(load(config), load(serve), arguments, prog=f"moonserve {command}")


def worker(argv: list[str]) -> int:
    """Runs `moonserve worker --role prefill|decode [--role-switching on | --conditional-disaggregation on] …`, or
    `moonserve worker --role prefill|decode --engine vllm [--attach URL] …`."""
    parser = ArgumentParser(prog="moonserve worker", add_help=False, allow_abbrev=False)
    parser.add_argument("--role", choices=("prefill", "decode"))
    parser.add_argument("--engine", choices=("moonserve", "vllm"), default="moonserve")
    parser.add_argument("--attach")
    for flag in ("--role-switching", "--conditional-disaggregation"):
        parser.add_argument(flag, choices=("off", "on"), default="off")
    try:
        known, rest = parser.parse_known_args(argv)
        if known.engine == "vllm" and "on" in (known.role_switching, known.conditional_disaggregation):
            parser.error("--engine vllm has neither --role-switching nor --conditional-disaggregation")
        if known.attach is not None and known.engine != "vllm":
            parser.error("--attach needs --engine vllm")
        needed = "aiohttp" if known.attach is not None else "vllm"
        if known.engine == "vllm" and importlib.util.find_spec(needed) is None:
            parser.error(f"--engine vllm needs {needed}, which {sys.executable} does not have")
        if known.role_switching == "on":
            command = "worker --role-switching on"
            rest += ["--role", known.role] if known.role else []
        elif known.role is None:
            parser.error("--role prefill or --role decode must be given")
        elif known.role == "decode" and known.conditional_disaggregation == "on":
            command = "worker --role decode --conditional-disaggregation on"
        elif known.attach is not None:
            command = f"worker --engine vllm --attach URL --role {known.role}"
            rest += ["--attach", known.attach]
        else:
            engine = "--engine vllm " if known.engine == "vllm" else ""
            command = f"worker {engine}--role {known.role}"
    except SystemExit:  # argparse has printed the error
        return EXIT_USAGE
    return _serve(command, rest)


def _usage(command: str, verbs: dict[str, tuple[str, str]]) -> str:
    width = max(map(len, verbs))
    lines = [f"  {verb:{width}}  {text}" for verb, (_, text) in verbs.items()]
    return "\n".join([f"usage: {command} VERB [options]", "", *lines, "", f"{command} VERB --help"])


if __name__ == "__main__":
    sys.exit(command())
