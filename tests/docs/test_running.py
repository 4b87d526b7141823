"""The commands of the pages run, and print what is shown.

All that need no options of their own share one cluster.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.fences import fences_of
from tests.docs.pages import ROOT
from tests.docs.running import Clusters, PageRun, expect
from tests.e2e.cluster import Cluster, running_cluster

PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if any(fence.runs for fence in fences_of(page.read_text()))
]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    """Starts what pages ask for, each command once."""
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


@pytest.mark.e2e
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_runs(
    page: Path, clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first block to its last, each with what those before it left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = PageRun(page.stem, tmp_path, clusters)
    for fence in fences_of(page.read_text()):
        run.run(fence)


def test_what_is_printed_is_compared() -> None:
    expect("a … c\n", "a   b\nc\n")
    expect("a\n…\nc\n", "a\nc\n")
    expect("…\nc\n", "c\n")
    with pytest.raises(AssertionError, match="but it printed"):
        expect("a … c\n", "a b d\n")
