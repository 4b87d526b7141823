"""watch: every event of every node until Ctrl-C; nodes that come, go and are lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client import plain_key
from tests.deploy.kvctl.stage import (
    ENVIRON,
    PATIENTLY,
    SEGMENT_BYTES,
    Kvctl,
    Stage,
    get,
    put,
    stage,
)
from tests.kvstore.nodes import running_node
from tests.patience import PATIENCE_S, until
from tests.processes import ROOT, running
from tests.redis_server import RedisServer


class Watch:
    """A `kvctl watch` process; waiting for its next line is the only synchronisation."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def until(self, **wanted: str) -> dict[str, Any]:
        """The next record with these fields; texts are beginnings."""
        for record in self._records():
            if all(str(record.get(name)).startswith(value) for name, value in wanted.items()):
                return record
        raise AssertionError(f"it ended without {wanted}")

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(timeout=PATIENCE_S)

    def _records(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        return map(json.loads, iter(self._process.stdout.readline, ""))


@contextlib.contextmanager
def watching(made: Stage, *flags: str) -> Iterator[Watch]:
    process = subprocess.Popen(
        [*PATIENTLY, "--registry", made.registry, "--json", "watch", *flags],
        cwd=ROOT,
        env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Watch(process)
    finally:
        process.kill()
        process.communicate()


def test_each_event_is_shown_with_its_key_or_counted_until_ctrl_c(pair: Stage) -> None:
    key = plain_key(b"watched").hex()
    with watching(pair, "--keys") as watch:
        watch.until(node="store-1", event="watched")
        put(pair.nodes["store-1"], {"watched": b"value"})
        added = watch.until(event="added", key=key)
        assert (added["node"], added["tier"]) == ("store-1", "memory")
        get(pair.nodes["store-1"], "watched")
        watch.until(event="read", key=key)
        assert watch.interrupt() == 0
    with watching(pair) as watch:  # counted by the second
        watch.until(node="store-0", event="watched")
        put(pair.nodes["store-0"], {"counted-by-watch": b"value"})
        assert watch.until(event="counts", node="store-0")["added"] == 1


def test_nodes_that_join_are_picked_up_and_lost_ones_are_shown() -> None:
    with stage(["store-0"]) as made, watching(made, "--keys") as watch:
        watch.until(node="store-0", event="watched")
        late = running_node(
            *("--dram", str(SEGMENT_BYTES), "--join", made.registry), instance_id="store-late"
        )
        with late as node:
            watch.until(node="store-late", event="watched")
            put(node, {"late": b"value"})
            watch.until(event="added", node="store-late")
            node.kill()
            watch.until(node="store-late", event="lost")


def test_a_node_that_refuses_is_lost_and_a_wrong_token_of_ours_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A Redis knows nothing of the cluster's token, so that only nodes can refuse."""
    with RedisServer() as redis, running_node("--dram", "1MiB", "--join", redis.url):
        kvctl = Kvctl(capsys, redis.url)
        until(lambda: kvctl("nodes").code == 0)  # a node is ready before it is a member
        with watching(Stage(redis.url, 0)) as watch:
            watch.until(node="store-0", event="watched")
            flags = ("--instance-id", "store-9", "--dram", "1MiB", "--join", redis.url)
            with running("kvstore", *flags, token="another"):
                watch.until(node="store-9", event="lost")
            assert watch.interrupt() == 0
        said = kvctl("watch", environ={"MOONSERVE_CLUSTER_TOKEN": "wrong"})
        assert said.code == 2
        assert "set MOONSERVE_CLUSTER_TOKEN" in said.err
