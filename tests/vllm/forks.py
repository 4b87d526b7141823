"""Programs with vLLM, forked from a process that has imported it. Of the 21 s of CPU time in which a server and its
engine core start, 18 are imports.

Each test process has one such process, in which vLLM has computed nothing.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from tests.processes import ROOT

IMPORTED = ["vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker", "vllm.v1.engine.core", __name__]

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    atexit.register(os._exit, 0)  # its own end would print the names of all that vLLM's libraries leak


def start(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> BaseProcess:
    """Starts `python -m module arguments`, which appends to `log` and leads a process group."""
    forking = multiprocessing.get_context("forkserver")
    with mock.patch.dict(os.environ, environment):
        forking.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    process = forking.Process(target=_run, args=(module, list(arguments), dict(environment), log))
    process.start()
    return process


def _run(module: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    fork = multiprocessing.get_context("fork")
    os.setsid()
    with log.open("ab") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    os.environ.update(environment)
    os.chdir(ROOT)
    # On a machine without GPU, vLLM demands that its own processes are spawned.
    multiprocessing.get_context = lambda method=None: fork
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
