"""Tests that the pages' commands run and print what is shown: bash runs consoles and scripts in a folder per page, and
Python blocks run in this process.

Pages use 127.0.0.1:8000. In commands this is replaced by the address of the cluster under test, and in their output it
is changed back. Pages whose `moonserve serve` command is the same share a cluster.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.fences import ROOT, Fence, fences_of, steps_of
from tests.e2e.cluster import Cluster, running_cluster
from tests.patience import PATIENCE_S

PAGES = [
    page for page in sorted((ROOT / "docs").glob("*.md")) if any(fence.runs for fence in fences_of(page.read_text()))
]


SHOWN_ADDRESS = "127.0.0.1:8000"
_LENIENT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

Clusters = Callable[[str, Path], Cluster]


class PageRun:
    """A run of one page. `clusters`: starts a cluster, given its `moonserve serve …` command and folder."""

    def __init__(self, name: str, folder: Path, clusters: Clusters) -> None:
        self._name = name
        self._folder = folder
        self._clusters = clusters
        self._cluster: Cluster | None = None
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""

    def run(self, fence: Fence) -> None:
        """Runs a block. Raises AssertionError with the page's line if it fails or its output differs."""
        try:
            self._run(fence)
        except Exception as error:
            raise AssertionError(f"{self._name}:{fence.line}: {error}") from error

    def _run(self, fence: Fence) -> None:
        if "title" in fence.words:
            (self._folder / fence.words["title"]).write_text(fence.text)
        elif "output" in fence.words:
            expect(fence.text, self._printed)
        elif not fence.runs:
            return
        elif "cluster" in fence.words:
            [step] = steps_of(fence.text)
            self._cluster = self._clusters(step.command, self._folder)
            expect(step.shown, self._as_shown(self._cluster.output))
        elif fence.language == "python":
            code = "\n" * fence.line + fence.text.replace(
                SHOWN_ADDRESS, self._address
            )  # tracebacks have the page's lines
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code, f"{self._name}.md", "exec"), self._names)
            self._printed = self._as_shown(printed.getvalue())
        elif fence.language == "bash":
            self._printed = self._shell(fence.text)
        else:
            for step in steps_of(fence.text):
                expect(step.shown or "…", self._shell(step.command))

    def _shell(self, command: str) -> str:
        """Runs a command and returns its stdout and stderr. Raises AssertionError if the exit code is not 0."""
        # PATH is as in an activated environment, even if the interpreter was called by its path.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "MOONSERVE_URL": f"http://{self._address}"}
        if self._cluster is not None:
            environ["MOONSERVE_CLUSTER_TOKEN"] = self._cluster.token
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.replace(SHOWN_ADDRESS, self._address)],
            cwd=self._folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        lasting = re.compile(r"^.* left\n", re.MULTILINE)  # progress, which a fast machine does not print
        return self._as_shown(lasting.sub("", done.stdout))

    @property
    def _address(self) -> str:
        return self._cluster.url.removeprefix("http://") if self._cluster else SHOWN_ADDRESS

    def _as_shown(self, printed: str) -> str:
        return printed.replace(self._address, SHOWN_ADDRESS)


def expect(shown: str, printed: str) -> None:
    """Compares output. `…` matches anything, alone on a line also no line; runs of blanks and newlines are equal.

    Raises AssertionError.
    """
    wanted = re.sub(r"\s*^…$\s*", "…", shown, flags=re.MULTILINE).replace("…", "...")
    matches = doctest.OutputChecker().check_output(wanted, printed, _LENIENT)
    assert matches, f"expected\n{shown}\nbut it printed\n{printed}"


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Starts the clusters of the pages, one per command."""
    running: dict[str, Cluster] = {}
    with contextlib.ExitStack() as stack:

        def started(command: str, folder: Path) -> Cluster:
            if command not in running:
                assert command.startswith("moonserve serve"), command
                logs = tmp_path_factory.mktemp("logs")
                flags = shlex.split(command)[2:]
                with contextlib.chdir(folder):
                    cluster = stack.enter_context(running_cluster(None, logs, *flags))
                running[command] = cluster
                cluster.wait_for("its summary", lambda: "Ctrl-C" in cluster.output)
            return running[command]

        yield started


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_runs(page: Path, clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page run in order, each with the files, names and cluster that earlier blocks left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = PageRun(page.stem, tmp_path, clusters)
    for fence in fences_of(page.read_text()):
        run.run(fence)
