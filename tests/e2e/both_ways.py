"""One request asked of two clusters, and what of the replies must be the same."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.cluster import Cluster

CROWDS = (1, 2, 8, 32, 128)  # requests asked at once
LOGPROB_TOLERANCE = 1e-4  # chunks of other sizes differ in the last bits
_CALL_ID = re.compile("call_[0-9a-f]{24}")


def ask(cluster: Cluster, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """The answer, and who prefilled and decoded."""
    with cluster.client() as client:
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        names = [reply.headers[f"x-{role}-instance-id"] for role in ("prefill", "decode")]
        return reply.json(), names[0], names[1]


def ask_apart(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """An answer that was handed off."""
    answer, *workers = ask(cluster, path, body)
    assert workers == ["prefill-0", "decode-0"]
    return answer


def ask_whole(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """An answer of which nothing was handed off. The conductor chooses that where it is predicted to be sooner, which
    it is at last behind enough requests that wait for the prefill worker, however slow its measurements say decode is.
    """
    for crowd in CROWDS:
        with ThreadPoolExecutor(crowd) as threads:
            replies = list(threads.map(lambda _: ask(cluster, path, body), range(crowd)))
        for answer, *workers in replies:
            if workers == ["decode-0", "decode-0"]:
                return answer
    raise AssertionError("every prompt was handed off")


def same(choice: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn anew for each reply, and where there are calls, without the difference between no text and
    an empty one."""
    message = choice.get("message")
    if message is None:
        return choice
    calls = [{**call, "id": _CALL_ID.sub("call", call["id"])} for call in message.get("tool_calls", [])]
    return {**choice, "message": {**message, "content": message["content"] or "", "tool_calls": calls}}


def assert_close(one: Any, other: Any, where: str = "") -> None:
    """Equal, but for the last bits of numbers; ranks of tokens that are as likely may change by one."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name, value in one.items():
            if name == "rank":
                assert abs(value - other[name]) <= 1, where
            else:
                assert_close(value, other[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for at, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_close(mine, theirs, f"{where}[{at}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, abs=LOGPROB_TOLERANCE), where
    else:
        assert one == other, where
