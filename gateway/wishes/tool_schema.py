"""What clients say of tools: those they offer, which they want called, and calls that were made before. Shapes only."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from gateway.wishes.part import Part

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]


class Function(Part):
    """A function that may be called. `strict`: its calls follow `parameters`, whatever `tool_choice` is."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes none
    strict: bool | None = None


class Tool(Part):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: what was not said is absent."""
        said = {
            name: value for name, value in self.function.model_dump().items() if value is not None
        }
        return {"type": self.type, "function": said}


class _Named(Part):
    name: _Name


class NamedChoice(Part):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: _Named


Tools = Annotated[list[Tool], Field(max_length=128)]  # OpenAI's own limit
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class _Called(Part):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object, as text")
        return text


class CallMade(Part):
    """An entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: _Called

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: arguments as an object, where OpenAI has text."""
        function = {
            "name": self.function.name,
            "arguments": json.loads(self.function.arguments or "{}"),
        }
        return {"id": self.id, "type": self.type, "function": function}
