"""The body of `POST /v1/responses`, as far as it differs from a chat completion's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from gateway.errors import ApiError
from gateway.wishes.schema import MAX_LOGPROBS, Body

# Parameters of either API that mean the same in both and are checked there.
SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "user",
    "priority", "cache_salt", "skip_special_tokens", "chat_template_kwargs", "parallel_tool_calls",
)  # fmt: skip

LOGPROBS = "message.output_text.logprobs"

# What exists elsewhere and would change the reply, by the values that ask for nothing that is not done.
_NOT_BUILT: Mapping[str, tuple[object, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "max_tool_calls": (None,),
    "reasoning": (None, {}, {"effort": None}, {"effort": "none"}),
    "n": (None, 1),
    "moderation": (None,),
}
# They concern a service that this server is not.
_HARMLESS = frozenset(
    {"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"}
)
# Without reasoning there is nothing to encrypt.
_INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})


class TextOptions(Body):
    """`text`: the form of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Body):
    """POST /v1/responses. Sampling parameters are `extra` here and checked as a chat completion's."""

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

    def check(self) -> set[str]:
        """Names of unknown parameters. Raises ApiError (400) for what this server does not do."""
        given = self.model_extra or {}
        for name, harmless in _NOT_BUILT.items():
            if given.get(name) not in harmless:
                raise _unsupported(name)
        for wanted in self.include or ():
            if wanted not in _INCLUDABLE:
                raise _unsupported("include", f"include: {wanted!r}")
        if self.text and self.text.verbosity not in (None, "medium"):
            raise _unsupported("text.verbosity")
        return given.keys() - _NOT_BUILT.keys() - set(SHARED) - _HARMLESS

    @property
    def shared(self) -> dict[str, Any]:
        """What goes into the chat completion as it is."""
        given = self.model_extra or {}
        return {name: given[name] for name in SHARED if given.get(name) is not None}


def _unsupported(param: str, what: str | None = None) -> ApiError:
    return ApiError(
        400,
        f"{what or param} is not supported by this server",
        param=param,
        code="unsupported_parameter",
    )
