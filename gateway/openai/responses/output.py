"""The response object, from what a chat completion says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.openai.chunks import Heading
from gateway.openai.responses.schema import ResponsesBody

Item = dict[str, Any]


class ResponseForm:
    """What every state of one response has in common."""

    def __init__(self, heading: Heading, body: ResponsesBody) -> None:
        given = body.model_extra or {}
        self.heading = heading
        self._echoed = {
            "id": heading.id,
            "object": "response",
            "created_at": heading.created,
            "model": heading.model,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": _or(given.get("temperature"), 1.0),
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": _or(given.get("top_p"), 1.0),
            "truncation": "disabled",
            "user": given.get("user"),
        }

    def under_way(self) -> dict[str, Any]:
        """Before its end."""
        return self._state("in_progress", [])

    def ended(
        self, output: Sequence[Item], finish_reason: str, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`finish_reason` and `usage`: the chat completion's."""
        cut = finish_reason == "length"
        return {
            **self._state("incomplete" if cut else "completed", list(output)),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage_of(usage),
        }

    def failed(self, message: str) -> dict[str, Any]:
        """After it had begun."""
        error = {"code": "server_error", "message": message}
        return {**self._state("failed", []), "error": error}

    def _state(self, status: str, output: list[Item]) -> dict[str, Any]:
        return {
            **self._echoed,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion's usage under the names of this API."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _or(value: Any, default: float) -> Any:
    return default if value is None else value
