"""Body of `POST /v1/responses`, where it differs from the body of a chat completion."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from moonserve.gateway.errors import invalid, unsupported
from moonserve.gateway.openai.request_schema import MAX_LOGPROBS, Body

# Parameters with the same meaning in both APIs, which the chat completion validates.
SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "user",
    "priority", "cache_salt", "prompt_cache_key", "prompt_cache_retention", "kv_cache", "skip_special_tokens",
    "chat_template_kwargs", "parallel_tool_calls",
)  # fmt: skip

LOGPROBS = "message.output_text.logprobs"

# Parameters that exist elsewhere and would change the reply, with the values that ask for nothing unsupported.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
    "n": (None, 1),
    "moderation": (None,),
}
# These concern a service that this server is not.
_HARMLESS = frozenset({"safety_identifier", "service_tier"})
# Reasoning is sent in the clear.
_INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})


class TextOptions(Body):
    """`text`: form of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Body):
    """Body of POST /v1/responses. Sampling parameters are `extra` here and validated as those of a chat completion."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None

    @property
    def reasoning_effort(self) -> Any:
        return (self.reasoning or {}).get("effort")

    def check(self) -> set[str]:
        """Returns the names of unknown parameters. Raises ApiError (400) for unsupported ones."""
        given = self.model_extra or {}
        for name, harmless in _UNSUPPORTED.items():
            if given.get(name) not in harmless:
                raise unsupported(f"{name} is not supported by this server", name)
        for wanted in self.include or ():
            if wanted not in _INCLUDABLE:
                raise unsupported(f"include: {wanted!r} is not supported by this server", "include")
        if self.text and self.text.verbosity not in (None, "medium"):
            raise unsupported("text.verbosity is not supported by this server", "text.verbosity")
        return given.keys() - _UNSUPPORTED.keys() - set(SHARED) - _HARMLESS

    @property
    def shared(self) -> dict[str, Any]:
        """Parameters that the chat completion receives unchanged."""
        given = self.model_extra or {}
        return {name: given[name] for name in SHARED if given.get(name) is not None}


Message = dict[str, Any]
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})

# Names of chat completion parameters in this API.
RENAMED: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def to_chat_body(body: ResponsesBody, messages: Sequence[Message]) -> dict[str, Any]:
    """Returns the body of the chat completion. `messages`: of this turn and the earlier ones."""
    chat: dict[str, Any] = {**body.shared, "stream_options": {"include_usage": True}}
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat["messages"] = [*instructions, *messages]
    if body.reasoning_effort is not None:
        chat["reasoning_effort"] = body.reasoning_effort
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
    """Converts items of input, or of an earlier response's output, to chat messages. Raises ApiError for items without
    a chat equivalent."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for number, item in enumerate(given):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            message = _message(item, where)
            if message["role"] == "assistant" and messages and _is_only_reasoning(messages[-1]):
                message |= {"reasoning_content": messages.pop()["reasoning_content"]}
            messages.append(message)
        case "function_call":
            _add_call(messages, item, where)
        case "function_call_output":
            text = _text(item.get("output"), f"{where}.output")
            call_id = _string(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        case "reasoning":
            parts = item.get("content") or ()
            text = "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
            if text:
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        case other:
            raise invalid(f"{where}: items of type {other!r} are not supported", where)


def _is_only_reasoning(message: Message) -> bool:
    return "reasoning_content" in message and not (message["content"] or message.get("tool_calls"))


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = _string(item, "role", where)
    text = _text(item.get("content"), f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def _text(parts: object, where: str) -> str:
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise invalid(f"{where}: must be a string or a list of parts", where)
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise invalid(f"{where}: only parts of text are supported", where)
        texts.append(part["text"])
    return "\n".join(texts)


def _add_call(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    """Adds a call. Consecutive calls, and the text before them, form one assistant message."""
    function = {name: _string(item, name, where) for name in ("name", "arguments")}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}: must be a string", f"{where}.{name}")
    return value


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"tools: only functions are supported, not {tool.get('type')!r}", "tools")
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
