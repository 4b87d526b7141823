"""Required form of an answer: translates a request's parameters into one grammar, checked before placement.

Each parameter becomes a text in the language of `protocol.grammar`, which travels with the request. A form that the
grammar library cannot follow exactly is refused with 400 naming the parameter; it is never relaxed.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonserve.gateway.errors import ApiError, invalid, unsupported
from moonserve.gateway.openai.request_schema import SamplingBody, SchemaOrText, StructuredOutputs
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.grammar import GrammarCache

# Allowed between JSON's tokens: what models write on one line, or a new line and an indentation. Unlimited whitespace
# would let a model spend its whole budget on spaces.
WHITESPACE = r" |\n[ \t]{0,64}"

_PREFIX = "start: "


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraint:
    """Required form of an answer."""

    grammar: str
    param: str  # the parameter that requests it
    is_json: bool = False

    @property
    def rule(self) -> str:
        """Right side of a rule of another grammar. Valid only if `is_json`."""
        return self.grammar.removeprefix(_PREFIX)


class ConstraintChecker:
    """Refuses forms that no worker could follow. Remembers compiled grammars."""

    def __init__(self, grammars: GrammarCache) -> None:
        self._grammars = grammars

    async def constraint_of(self, body: SamplingBody) -> OutputConstraint | None:
        """Returns the checked form that a request asks for; None = any. Raises ApiError naming the parameter."""
        names = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _MAKERS))
        if all(getattr(body, name) is None for name in names):
            return None
        constraint = await asyncio.to_thread(constraint_of, body)  # translating a long GBNF takes long
        if constraint is not None:
            await self.check(constraint.grammar, constraint.param)
        return constraint

    async def check(self, grammar: str, param: str) -> None:
        """Compiles an unknown grammar in a thread. Raises ApiError naming the parameter."""
        if self._grammars.is_compiled(grammar):
            return
        try:
            await asyncio.to_thread(self._grammars.new_matcher, grammar)
        except InvalidRequest as error:
            raise refused(error.message, param) from error


def constraint_of(body: SamplingBody) -> OutputConstraint | None:
    """Returns the form that a request asks for; None = any. Raises ApiError for several forms or an unsupported one."""
    constraints = [each for each in _constraints(body) if each is not None]
    if len(constraints) > 1:
        first, second = constraints[0].param, constraints[1].param
        raise refused(f"cannot be combined with {first}, which also constrains the output; omit one of them", second)
    if constraints and body.ignore_eos:
        raise refused(
            f"cannot be combined with {constraints[0].param}: constrained output ends with the end-of-sequence token",
            "ignore_eos",
        )
    return constraints[0] if constraints else None


def _constraints(body: SamplingBody) -> Iterator[OutputConstraint | None]:
    yield _of_response_format(body)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs)
    for kind, make in _MAKERS.items():
        if (value := getattr(body, f"guided_{kind}")) is not None:
            yield make(value, f"guided_{kind}")


def _of_response_format(body: SamplingBody) -> OutputConstraint | None:
    value = body.response_format
    if value is None or value.type == "text":
        return None
    if value.type == "json_object":
        return json_constraint({"type": "object"}, "response_format")
    if value.json_schema is None or value.json_schema.schema_ is None:
        raise ApiError(
            400,
            "response_format of type json_schema needs json_schema with a name and a schema",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return json_constraint(value.json_schema.schema_, "response_format.json_schema.schema")


def _of_structured_outputs(value: StructuredOutputs) -> Iterator[OutputConstraint]:
    where = "structured_outputs"
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(value, name) not in (None, False):
            raise unsupported(f"{where}.{name} is not supported by this server", f"{where}.{name}")
    spacing: dict[str, Any] = {"whitespace_pattern": value.whitespace_pattern or WHITESPACE}
    if value.disable_any_whitespace:
        spacing = {"whitespace_flexible": False}
    if value.json_ is not None:
        yield json_constraint(value.json_, f"{where}.json", spacing)
    if value.json_object:
        yield json_constraint({"type": "object"}, f"{where}.json_object", spacing)
    for kind in ("regex", "choice", "grammar"):
        if (given := getattr(value, kind)) is not None:
            yield _MAKERS[kind](given, f"{where}.{kind}")


def json_constraint(schema: SchemaOrText, param: str, spacing: Mapping[str, Any] | None = None) -> OutputConstraint:
    """Returns the form of JSON that follows a schema. Raises ApiError if a schema given as text is no JSON object."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise refused("is not valid JSON", param) from error
        if not isinstance(schema, dict):
            raise refused("must be a JSON schema, which is an object", param)
    return OutputConstraint(grammar=_PREFIX + json_rule(schema, spacing), param=param, is_json=True)


def json_rule(schema: Mapping[str, Any], spacing: Mapping[str, Any] | None = None) -> str:
    """Returns the right side of a rule for JSON that follows a schema. `spacing`: options of llguidance."""
    return "%json " + json.dumps({**schema, "x-guidance": spacing or {"whitespace_pattern": WHITESPACE}})


def text_rule(text: str) -> str:
    """Returns a rule that matches exactly this text. Lark spells strings like ASCII JSON."""
    return json.dumps(text)


def _choice_constraint(choices: list[str], param: str) -> OutputConstraint:
    return OutputConstraint(grammar=_PREFIX + " | ".join(map(text_rule, choices)), param=param)


def _regex_constraint(regex: str, param: str) -> OutputConstraint:
    from llguidance import regex_to_lark

    num_backslashes = len(regex) - len(regex.rstrip("\\"))
    if num_backslashes % 2:
        raise refused("the regular expression ends within an escape sequence", param)
    return OutputConstraint(grammar=f"{_PREFIX}/{regex_to_lark(regex)}/", param=param)


def _grammar_constraint(grammar: str, param: str) -> OutputConstraint:
    """Returns the form of a grammar in Lark, or in GBNF, which is translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return OutputConstraint(grammar=any_to_lark(grammar), param=param)
    except Exception as error:  # includes bare Exception, depending on where the text is wrong
        raise refused(f"is neither Lark nor GBNF: {error}", param) from error


_MAKERS: Mapping[str, Callable[[Any, str], OutputConstraint]] = {
    "json": json_constraint,
    "regex": _regex_constraint,
    "choice": _choice_constraint,
    "grammar": _grammar_constraint,
}


def refused(message: str, param: str) -> ApiError:
    """Returns the error 400 with a message that begins with the parameter."""
    return invalid(f"{param}: {message}", param)
