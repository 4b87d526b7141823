"""Reading streamed completions."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx


def stream_tokens(client: httpx.Client, body: dict[str, Any]) -> list[int]:
    """Token ids of a streamed completion that was asked to return them; fails unless it ends well."""
    tokens: list[int] = []
    reasons: list[str] = []
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        (choice,) = event["choices"]
        tokens += choice.get("token_ids") or ()
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert reasons == ["length"]
    return tokens


def read_stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed reply; fails unless it ends well."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert all("error" not in chunk for chunk in chunks)
    return chunks
