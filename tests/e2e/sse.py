"""Reading streamed replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

DONE = "data: [DONE]"


@dataclass(slots=True)
class Said:
    """All that a client saw of one choice, in whatever pieces it came."""

    text: str = ""
    arguments: str = ""  # of tool calls
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    request_ids: set[str] = field(default_factory=set)

    def add(self, chunk: dict[str, Any]) -> None:
        self.request_ids.add(chunk["id"])
        (choice,) = chunk["choices"]
        delta = choice.get("delta") or {"content": choice.get("text")}
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            self.arguments += call["function"]["arguments"]
        self.token_ids += choice.get("token_ids") or ()
        self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
        self.reason = choice["finish_reason"] or self.reason


def read_stream(
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    on_chunk: Callable[[dict[str, Any]], None] = lambda chunk: None,
) -> list[dict[str, Any]]:
    """The chunks of a streamed reply; fails unless it ends well. `on_chunk` is told of each as it comes."""
    chunks: list[dict[str, Any]] = []
    line = ""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in filter(None, response.iter_lines()):
            if line != DONE:
                chunks.append(json.loads(line.removeprefix("data: ")))
                assert "error" not in chunks[-1], chunks[-1]
                on_chunk(chunks[-1])
    assert line == DONE
    return chunks


def read_choice(
    client: httpx.Client,
    body: dict[str, Any],
    on_tokens: Callable[[int], None] = lambda count: None,
    path: str = "/v1/completions",
) -> Said:
    """A streamed reply of one choice; `on_tokens` is told how many tokens there are as they come."""
    said = Said()

    def on_chunk(chunk: dict[str, Any]) -> None:
        said.add(chunk)
        on_tokens(len(said.token_ids))

    read_stream(client, path, {**body, "return_token_ids": True}, on_chunk)
    return said
