"""One request asked of two clusters and streamed of one, and what of the replies must be the same."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.sse import read_stream

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


def streamed(cluster: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each choice as in a whole reply, put together from chunks."""
    choices: dict[int, dict[str, Any]] = {}
    with cluster.client() as client:
        chunks = read_stream(client, path, body)
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], _empty(part))
            _add(choice, part)
    return [choices[index] for index in sorted(choices)]


def _empty(part: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"index": part["index"], "token_ids": [], "logprobs": None}
    if "delta" in part:
        return {**empty, "message": {"role": "assistant", "content": "", "refusal": None}}
    return {**empty, "text": ""}


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["finish_reason"] = part["finish_reason"]
    choice["token_ids"] += part.get("token_ids", [])
    if "prompt_token_ids" in part:
        choice["prompt_token_ids"] = part["prompt_token_ids"]
    for name, column in (part["logprobs"] or {}).items():
        choice["logprobs"] = choice["logprobs"] or {}
        choice["logprobs"][name] = [*choice["logprobs"].get(name, []), *column]
    if "delta" in part:
        _add_delta(choice["message"], part["delta"])
    else:
        choice["text"] += part["text"]


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    for call in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append(
                {"id": call["id"], "type": call["type"], "function": {"name": "", "arguments": ""}}
            )
        for name, text in call["function"].items():
            calls[call["index"]]["function"][name] += text


def same(choice: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn anew for each reply, and where there are calls, without the difference between no text and
    an empty one."""
    message = choice.get("message")
    if message is None:
        return choice
    calls = [
        {**call, "id": _CALL_ID.sub("call", call["id"])} for call in message.get("tool_calls", [])
    ]
    return {
        **choice,
        "message": {**message, "content": message["content"] or "", "tool_calls": calls},
    }


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
