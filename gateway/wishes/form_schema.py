"""What clients say of an answer's form: `response_format` as OpenAI has it, `structured_outputs` as vLLM has it.

Shapes only; `gateway.wishes.forms` says which of them go together and makes grammars of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.wishes.part import Part

Choices = Annotated[
    list[Annotated[str, Field(max_length=10_000)]], Field(min_length=1, max_length=1_000)
]
SchemaOrText = dict[str, Any] | str


class NamedSchema(Part):
    """`response_format.json_schema`. Answers follow the schema whether or not it is called strict."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Part):
    """`structured_outputs`: one of the first five, and how JSON is spaced."""

    json_: SchemaOrText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Annotated[str, Field(max_length=1_000)] | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None
