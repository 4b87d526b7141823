"""Between the items of the Responses API and the messages of a chat. Pure.

A turn's messages are: its instructions, the messages of the responses before it, its input. Instructions are a turn's
own and are not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.errors import ApiError
from gateway.responses.schema import LOGPROBS, ResponsesBody

Message = dict[str, Any]
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})

# Parameters of a chat completion, as they are called here.
RENAMED: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def chat_of(body: ResponsesBody, messages: Sequence[Message]) -> dict[str, Any]:
    """The body of the chat completion; `messages`: of this turn and those before it."""
    chat: dict[str, Any] = {**body.shared, "stream_options": {"include_usage": True}}
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat["messages"] = [*instructions, *messages]
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text and body.text.format:
        chat["response_format"] = _format(body.text.format)
    return chat


def input_messages(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Raises ApiError for items that cannot be said in a chat."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for number, item in enumerate(given):
        _add(messages, item, f"input[{number}]")
    return messages


def output_messages(items: Iterable[Mapping[str, Any]]) -> list[Message]:
    """A response's output as the next turn's prompt has it."""
    return input_messages(list(items))


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            messages.append(_message(item, where))
        case "function_call":
            _add_call(messages, item, where)
        case "function_call_output":
            content = item.get("output")
            text = content if isinstance(content, str) else _text(content, f"{where}.output")
            call_id = _string(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case "reasoning":
            pass  # what a model thought is not part of later prompts
        case other:
            raise _invalid(f"{where}: items of type {other!r} are not supported", where)


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = _string(item, "role", where)
    content = item.get("content")
    text = content if isinstance(content, str) else _text(content, f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def _text(parts: object, where: str) -> str:
    if not isinstance(parts, list):
        raise _invalid(f"{where}: must be a string or a list of parts", where)
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise _invalid(f"{where}: only parts of text are supported", where)
        texts.append(part["text"])
    return "\n".join(texts)


def _add_call(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Calls that follow each other, and the text before them, are one message of the assistant."""
    function = {name: _string(item, name, where) for name in ("name", "arguments")}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{name}: must be a string", f"{where}.{name}")
    return value


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(
            400,
            f"tools: only functions are supported, not {tool.get('type')!r}",
            param="tools",
            code="unsupported_parameter",
        )
    wanted = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in wanted if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice or "auto"


def _format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return dict(form)
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
