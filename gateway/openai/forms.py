"""Required form of an answer: translates a request's parameters into one grammar, checked before placement.

Each parameter becomes a text in the language of `protocol.grammar`, which travels with the request. A form that the
grammar library cannot follow exactly is refused with 400 naming the parameter; it is never relaxed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.http.errors import ApiError, invalid, unsupported
from gateway.openai.schema import SamplingBody, SchemaOrText, StructuredOutputs
from protocol.errors import InvalidRequest
from protocol.grammar import Grammars

# Allowed between JSON's tokens: what models write on one line, or a new line and an indentation. Unlimited whitespace
# would let a model spend its whole budget on spaces.
WHITESPACE = r" |\n[ \t]{0,64}"

_PREFIX = "start: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Required form of an answer."""

    grammar: str
    param: str  # the parameter that requests it
    is_json: bool = False

    @property
    def rule(self) -> str:
        """Right side of a rule of another grammar. Valid only if `is_json`."""
        return self.grammar.removeprefix(_PREFIX)


class FormChecker:
    """Refuses forms that no worker could follow. Remembers compiled grammars."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    async def form_of(self, body: SamplingBody) -> Form | None:
        """Returns the checked form that a request asks for; None = any. Raises ApiError naming the parameter."""
        if not _asks_for_form(body):
            return None
        form = await asyncio.to_thread(form_of, body)  # translating a long GBNF takes long
        if form is not None:
            await self.check(form.grammar, form.param)
        return form

    async def check(self, grammar: str, param: str) -> None:
        """Compiles an unknown grammar in a thread. Raises ApiError naming the parameter."""
        if self._grammars.knows(grammar):
            return
        try:
            await asyncio.to_thread(self._grammars.start, grammar)
        except InvalidRequest as error:
            raise refused(error.message, param) from error


def _asks_for_form(body: SamplingBody) -> bool:
    names = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in _MAKERS))
    return any(getattr(body, name) is not None for name in names)


def form_of(body: SamplingBody) -> Form | None:
    """Returns the form that a request asks for; None = any. Raises ApiError for several forms or an unsupported one."""
    forms = [form for form in _forms(body) if form is not None]
    if len(forms) > 1:
        first, second = forms[0].param, forms[1].param
        raise refused(f"{first} already says what the answer looks like; leave one out", second)
    if forms and body.ignore_eos:
        raise refused(
            f"an answer whose form {forms[0].param} gives ends with the end-of-sequence token",
            "ignore_eos",
        )
    return forms[0] if forms else None


def _forms(body: SamplingBody) -> Iterator[Form | None]:
    yield _of_response_format(body)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs)
    for kind, make in _MAKERS.items():
        if (wish := getattr(body, f"guided_{kind}")) is not None:
            yield make(wish, f"guided_{kind}")


def _of_response_format(body: SamplingBody) -> Form | None:
    wish = body.response_format
    if wish is None or wish.type == "text":
        return None
    if wish.type == "json_object":
        return json_form({"type": "object"}, "response_format")
    if wish.json_schema is None or wish.json_schema.schema_ is None:
        raise ApiError(
            400,
            "response_format of type json_schema needs json_schema with a name and a schema",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    return json_form(wish.json_schema.schema_, "response_format.json_schema.schema")


def _of_structured_outputs(wish: StructuredOutputs) -> Iterator[Form]:
    where = "structured_outputs"
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(wish, name) not in (None, False):
            raise unsupported(f"{where}.{name} is not supported by this server", f"{where}.{name}")
    spacing: dict[str, Any] = {"whitespace_pattern": wish.whitespace_pattern or WHITESPACE}
    if wish.disable_any_whitespace:
        spacing = {"whitespace_flexible": False}
    if wish.json_ is not None:
        yield json_form(wish.json_, f"{where}.json", spacing)
    if wish.json_object:
        yield json_form({"type": "object"}, f"{where}.json_object", spacing)
    for kind in ("regex", "choice", "grammar"):
        if (given := getattr(wish, kind)) is not None:
            yield _MAKERS[kind](given, f"{where}.{kind}")


def json_form(schema: SchemaOrText, param: str, spacing: Mapping[str, Any] | None = None) -> Form:
    """Returns the form of JSON that follows a schema. Raises ApiError if a schema given as text is no JSON object."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise refused("is not valid JSON", param) from error
        if not isinstance(schema, dict):
            raise refused("must be a JSON schema, which is an object", param)
    return Form(grammar=_PREFIX + json_rule(schema, spacing), param=param, is_json=True)


def json_rule(schema: Mapping[str, Any], spacing: Mapping[str, Any] | None = None) -> str:
    """Returns the right side of a rule for JSON that follows a schema. `spacing`: options of llguidance."""
    return "%json " + json.dumps({**schema, "x-guidance": spacing or {"whitespace_pattern": WHITESPACE}})


def text_rule(text: str) -> str:
    """Returns a rule that matches exactly this text. Lark spells strings like ASCII JSON."""
    return json.dumps(text)


def _choice_form(choices: list[str], param: str) -> Form:
    return Form(grammar=_PREFIX + " | ".join(map(text_rule, choices)), param=param)


def _regex_form(regex: str, param: str) -> Form:
    from llguidance import regex_to_lark

    num_backslashes = len(regex) - len(regex.rstrip("\\"))
    if num_backslashes % 2:
        raise refused("the regular expression ends in the middle of an escape", param)
    return Form(grammar=f"{_PREFIX}/{regex_to_lark(regex)}/", param=param)


def _grammar_form(grammar: str, param: str) -> Form:
    """Returns the form of a grammar in Lark, or in GBNF, which is translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return Form(grammar=any_to_lark(grammar), param=param)
    except Exception as error:  # includes bare Exception, depending on where the text is wrong
        raise refused(f"is neither Lark nor GBNF: {error}", param) from error


_MAKERS: Mapping[str, Callable[[Any, str], Form]] = {
    "json": json_form,
    "regex": _regex_form,
    "choice": _choice_form,
    "grammar": _grammar_form,
}


def refused(message: str, param: str) -> ApiError:
    """Returns the error 400 with a message that begins with the parameter."""
    return invalid(f"{param}: {message}", param)
