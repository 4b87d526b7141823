"""Request bodies, validated field by field before any other work.

Frozen pydantic models in strict mode: strings are not converted to numbers, NaN is refused, every number has bounds. An
error names the parameter like OpenAI does. Unknown parameters are ignored with one warning each. This module does not
know the model's limits or the tokenizer; `gateway.openai.prompts` checks against those.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from moonserve.gateway.errors import ApiError, invalid, unsupported
from moonserve.gateway.text.message_parser import is_object
from moonserve.protocol.request import CacheHints

log = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_LOGPROBS = 20  # OpenAI's own limit for chats
_RETENTIONS_S = {"in_memory": 3_600.0, "in-memory": 3_600.0, "24h": 86_400.0}  # OpenAI's own limits
_MAX_BAD_WORDS = 128
_MAX_STOPS = 32
_MAX_WARNED_NAMES = 1_000

_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
_BadWord = Annotated[str, Field(min_length=1, max_length=200)]
_StopString = Annotated[str, Field(min_length=1, max_length=1_000)]
_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]


class Body(BaseModel):
    """A body or a part of one; additional fields are kept in `model_extra`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


Choices = Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(min_length=1, max_length=1_000)]
SchemaOrText = dict[str, Any] | str


class NamedSchema(Body):
    """`response_format.json_schema`. Answers follow the schema even if it is not marked strict."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """`structured_outputs`: one of the first five fields, and options for whitespace in JSON."""

    json_: SchemaOrText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Annotated[str, Field(max_length=1_000)] | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None


_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]


class Function(Body):
    """A function that may be called. `strict`: its calls follow `parameters` for any `tool_choice`."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema; None = the function takes no arguments
    strict: bool | None = None


class Tool(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect: missing fields are absent."""
        fields = {name: value for name, value in self.function.model_dump().items() if value is not None}
        return {"type": self.type, "function": fields}


class _Named(Body):
    name: _Name


class NamedChoice(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: _Named


Tools = Annotated[list[Tool], Field(max_length=128)]  # OpenAI's own limit
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class _FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        if not is_object(text or "{}"):
            raise ValueError("must be a JSON object, as text")
        return text


class ToolCall(Body):
    """An entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: _FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect: arguments as an object, where OpenAI has text."""
        function = {
            "name": self.function.name,
            "arguments": json.loads(self.function.arguments or "{}"),
        }
        return {"id": self.id, "type": self.type, "function": function}


class KvCache(Body):
    """`kv_cache`: what the client knows about the further use of the prompt's and the answer's KV."""

    model_config = ConfigDict(extra="forbid")

    store: bool | None = None
    return_within_s: Annotated[float, Field(gt=0.0, le=3_600.0)] | None = None
    ttl_s: Annotated[float, Field(gt=0.0, le=86_400.0)] | None = None
    eviction_priority: Literal["normal", "low"] | None = None


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool | None = None
    include_event_ids: bool | None = None


class SamplingBody(Body):
    """Parameters that chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: _StopString | Annotated[list[_StopString], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1_024)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1_024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None  # names a session
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    kv_cache: KvCache | None = None
    return_token_ids: bool | None = None
    x_timing: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[_BadWord], Field(max_length=_MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def cache_hints(self) -> CacheHints:
        given = self.kv_cache or KvCache()
        return CacheHints(
            store=given.store is not False,
            return_within_s=given.return_within_s,
            ttl_s=given.ttl_s or _RETENTIONS_S.get(self.prompt_cache_retention or ""),
            low_priority=given.eviction_priority == "low",
        )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def includes_event_ids(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_event_ids)


# Names of an assistant message's reasoning in requests and in templates, all set to the one that is given.
_REASONING = ("reasoning_content", "reasoning", "thinking")


class ChatMessage(Body):
    """One turn of a conversation. Additional fields are passed to the chat template."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that templates expect: text parts joined, arguments of calls as objects.
        Raises ApiError for parts other than text."""
        calls = [call.for_template() for call in self.tool_calls or ()]
        given = self.model_extra or {}
        reasoning = next((given[name] for name in _REASONING if given.get(name)), None)
        fields = {**dict.fromkeys(_REASONING, reasoning), "content": self._text(), "tool_calls": calls or None}
        if calls and fields["content"]:
            fields["thinking"] = None  # gpt-oss's template takes either
        return {**self.model_dump(), **fields}

    def _text(self) -> str | None:
        if not isinstance(self.content, list):
            return self.content
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) < len(self.content) or not all(isinstance(text, str) for text in texts):
            raise ApiError(400, "content parts must have type text and a string", param="messages")
        return "\n".join(str(text) for text in texts)


class ChatBody(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    include_reasoning: bool | None = None

    @property
    def template_variables(self) -> Mapping[str, object]:
        """Variables of the chat template. Reasoning effort `none` is the variable with which templates turn it off."""
        effort: dict[str, object] = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        if self.reasoning_effort == "none":
            effort = {"enable_thinking": False}
        return effort | (self.chat_template_kwargs or {})

    @property
    def adds_generation_prompt(self) -> bool:
        """True if a new assistant message begins. Raises ApiError if the last message is also to be continued."""
        if not self.continue_final_message:
            return self.add_generation_prompt
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        return False


class CompletionBody(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: Any  # a union of four list shapes, which gateway.openai.prompts tells apart in one pass
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None

    @property
    def echoed_logprobs(self) -> int | None:
        """Number of likeliest tokens reported for each token of the echoed prompt; None = none requested."""
        return self.logprobs if self.echo else None


# Parameters that exist elsewhere and would change the output, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "use_beam_search": (None, False),
    "chat_template": (None,),
    "logits_processors": (None, []),
}

# Parameters of `_UNSUPPORTED` that are refused only if the body has no such field.
_SUPPORTED_FOR_CHAT = frozenset({"tools", "tool_choice"})

B = TypeVar("B", bound=Body)


class BodyParser:
    """Parses bodies, and remembers which unknown parameters have been warned about."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def parse(self, cls: type[B], raw: bytes) -> B:
        """Parses and validates a body. Raises ApiError (400) naming the parameter."""
        body = validated(cls, raw)
        self._check_extra(body)
        return body

    def warn_of_unknown(self, names: Iterable[str]) -> None:
        """Logs one warning per unknown parameter."""
        for name in set(names) - self._warned:
            if len(self._warned) < _MAX_WARNED_NAMES:
                self._warned.add(name)
                log.warning("ignoring the unknown parameter %.100r", name)

    def _check_extra(self, body: Body) -> None:
        given = body.model_extra or {}
        for name, harmless in _UNSUPPORTED.items():
            if name in _SUPPORTED_FOR_CHAT and name in type(body).model_fields:
                continue
            value = given.get(name, getattr(body, name, None))
            if value not in harmless:
                raise unsupported(f"{name} is not supported by this server yet", name)
        self.warn_of_unknown(given.keys() - _UNSUPPORTED.keys())


def validated(cls: type[B], raw: bytes) -> B:
    """Returns a body parsed from JSON. Raises ApiError (400) naming the parameter."""
    try:
        return cls.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    param = _param(first["loc"])
    where = f"{param}: " if param else ""
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{where}{first['msg']}", param=param, code=code)


def _param(location: tuple[int | str, ...]) -> str | None:
    """Formats a location, without a union's branches: `("messages", 0, "content", "str")` → `messages[0].content`."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "list"):
            name += f".{part}" if name else part
    return name or None
