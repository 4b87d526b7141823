"""Reading streamed replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2 as httpx

DONE = "data: [DONE]"


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


def read_completion(
    client: httpx.Client,
    body: dict[str, Any],
    on_tokens: Callable[[int], None] = lambda count: None,
) -> tuple[str, list[int]]:
    """Text and token ids of a streamed completion that was asked to return them; `on_tokens` is told how many there are
    as they come."""
    text, tokens = "", list[int]()

    def on_chunk(chunk: dict[str, Any]) -> None:
        nonlocal text
        (choice,) = chunk["choices"]
        text += choice["text"]
        tokens.extend(choice.get("token_ids") or ())
        on_tokens(len(tokens))

    read_stream(client, "/v1/completions", body, on_chunk)
    return text, tokens


def stream_tokens(client: httpx.Client, body: dict[str, Any]) -> list[int]:
    """Token ids of a streamed completion that was asked to return them and must end by its length."""
    choices = [
        choice for c in read_stream(client, "/v1/completions", body) for choice in c["choices"]
    ]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    return [token for choice in choices for token in choice.get("token_ids") or ()]
