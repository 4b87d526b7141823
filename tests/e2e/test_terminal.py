"""`moonserve top` and `moonserve chat`, on a terminal, beside a live cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from models import demo_model_path
from tests.e2e.cluster import Cluster, running_cluster
from tests.terminal import terminal

pytestmark = pytest.mark.e2e

COMMAND = (sys.executable, "-m", "deploy")
CTRL_C, CTRL_D = "\x03", "\x04"
TRIES = 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("terminal")
    with running_cluster(demo_model_path(), folder / "logs") as started:
        yield started


def test_top_shows_the_cluster_live_until_it_is_interrupted(cluster: Cluster) -> None:
    prompt = "the same beginning of every prompt, again and again " * 8
    for _ in range(2):
        cluster.complete(prompt, max_tokens=8, ignore_eos=True)
    with terminal((*COMMAND, "top", "--url", cluster.url, "--interval", "0.2")) as top:
        top.wait_for("ready")
        for shown in ("TTFT", "p95", "TBT", "prefix hits"):
            top.wait_for(shown)
        # A screen may come in pieces; the next one has it all again.
        for shown in ("decode-0", "prefill-0", "store-0", "prefilling 0", "hot prefix"):
            top.wait_for(shown)
        top.wait_for(r"throughput +\d")  # a second look
        top.type(CTRL_C)
        assert top.ended() == 0
    assert "Traceback" not in top.text


def test_top_in_a_pipe_is_one_look(cluster: Cluster) -> None:
    command = [*COMMAND, "top", "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "prefill-0" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_conversation_streams_and_says_what_it_took(cluster: Cluster) -> None:
    chat = (*COMMAND, "chat", "--url", cluster.url, "--max-tokens", "24", "--temperature", "0")
    with terminal(chat) as spoken:
        spoken.wait_for("> ")
        spoken.type("Tell me a long story about a moon that serves tea to tired travellers.\n")
        first = spoken.wait_for(r"TTFT \d+ ms · .*?(\d+) of (\d+) prompt tokens cached")
        spoken.wait_for("> ")
        spoken.type("And then?\n")
        second = spoken.wait_for(r"TTFT \d+ ms · .*?(\d+) of (\d+) prompt tokens cached")
        assert int(second[2]) > int(first[2]), "the first turn is in the second prompt"
        assert int(second[1]) > 0, "and in a cache"
        spoken.wait_for("> ")
        spoken.type("/reset\n")
        spoken.wait_for("forgotten")
        spoken.wait_for("> ")
        spoken.type(CTRL_D)
        assert spoken.ended() == 0
    assert "Traceback" not in spoken.text


def test_an_interrupt_ends_the_answer_and_not_the_conversation(cluster: Cluster) -> None:
    """An answer may end by itself before the interrupt comes, which then ends the program: another one is tried."""
    assert any(is_interrupted(cluster) for _ in range(TRIES))


def is_interrupted(cluster: Cluster) -> bool:
    chat = (*COMMAND, "chat", "--url", cluster.url, "--max-tokens", "2000", "--temperature", "2")
    with terminal(chat) as spoken:
        spoken.wait_for("> ")
        spoken.type("Count as far as you can.\n")
        spoken.wait_for("can.\n.+")
        spoken.type(CTRL_C)
        if spoken.wait_for(r"stopped\n|TTFT \d+ ms")[0] != "stopped\n":
            return False
        spoken.wait_for("> ")
        cluster.wait_for("its end in the cluster", lambda: not any(live(cluster)))
        spoken.type("/quit\n")
        assert spoken.ended() == 0
    return True


def live(cluster: Cluster) -> list[int]:
    with cluster.client() as client:
        return list(client.get("/v1/figures").json()["phases"].values())


def test_one_question_is_answered_and_that_is_all(cluster: Cluster) -> None:
    command = [*COMMAND, "chat", "--url", cluster.url, "--max-tokens", "5", "hello", "there"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "5 tokens" in done.stdout


@pytest.mark.parametrize("verb", ["top", "chat"])
def test_without_a_gateway_one_is_told_how_to_name_it(verb: str) -> None:
    command = [*COMMAND, verb, "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "--url" in done.stderr
    assert "Traceback" not in done.stderr
