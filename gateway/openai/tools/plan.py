"""What a request's tools mean for its answer: what it must look like, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.generation.events import Choice
from gateway.http.errors import ApiError, unsupported
from gateway.openai.forms import Form, FormChecker, json_form, json_rule, refused, text_rule
from gateway.openai.schema import ChatBody, Function, NamedChoice
from gateway.openai.tools.formats import Format, ToolParser

_TEXT = r"/(.|\n)*/"
_TEXT_WITHOUT_CALL = r"/([^{](.|\n)*)?/"  # in a format where a message that begins with { calls


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """What may be called, and how it is written."""

    format: Format
    schemas: Mapping[str, Mapping[str, Any]]  # of arguments, by function
    is_parallel: bool  # several calls in one message
    is_special: Callable[[str], bool]  # whether the model has a special token that is spelled so

    def required(self) -> str:
        """Calls and nothing else."""
        return f"start: {self._calls()}\n{self._rules()}"

    def instead_of(self, rule: str) -> str:
        """Calls, or what the rule says."""
        return f"start: {rule} | {self._calls()}\n{self._rules()}"

    def optional(self) -> str:
        """Any text; where it calls, it calls correctly."""
        if not self.format.opening:
            return f"start: PLAIN | {self._calls()}\nPLAIN: {_TEXT_WITHOUT_CALL}\n{self._rules()}"
        start = "(lead rest)* TEXT" if self.is_parallel else "TEXT | lead rest"
        # Lazy: text ends where the tag does, the first time.
        lazy = "" if self.is_special(self.format.opening) else "[lazy]"
        lead = f"lead{lazy}: TEXT {self._tag(self.format.opening)}"
        # The first line marks what needs llguidance's own dialect.
        return f"%llguidance {{}}\nstart: {start}\n{lead}\nTEXT: {_TEXT}\n{self._rules()}"

    def _calls(self) -> str:
        return f"call ({text_rule(self.format.between)} call)*" if self.is_parallel else "call"

    def _rules(self) -> str:
        """`call`, of which `rest` is what follows the opening tag."""
        padding = text_rule(self.format.padding) if self.format.padding else ""
        names = " | ".join(f"f{number}" for number in range(len(self.schemas)))
        rules = [
            f"call: {self._tag(self.format.opening)} rest",
            f"rest: {padding} ({names}) {padding} {self._tag(self.format.closing)}",
        ]
        for number, (name, schema) in enumerate(self.schemas.items()):
            head = f'{{"name": "{name}", "{self.format.arguments_key}": '
            rules.append(f"f{number}: {text_rule(head)} {json_rule(schema)} {text_rule('}')}")
        return "\n".join(rules)

    def _tag(self, tag: str) -> str:
        if not tag:
            return ""
        return tag if self.is_special(tag) else text_rule(tag)


_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How one request's answers are made and read."""

    grammar: str  # that they follow; empty = none
    format: Format
    names: tuple[str, ...]  # of the functions that may be called

    def seen_in(self, choices: tuple[Choice, ...], body: ChatBody) -> tuple[Choice, ...]:
        """The choices with special tokens in their text, unless the client says otherwise: tags may be such."""
        keeps = body.skip_special_tokens is not True
        return tuple(replace(choice, skip_special_tokens=not keeps) for choice in choices)

    def parser(self, *, is_eager: bool) -> ToolParser:
        """For one answer."""
        return self.format.parser(self.names, is_eager=is_eager)


class ToolPlanner:
    """For one model. `format`: how it writes calls; None = not known. `allows_auto`: whether models may be left to
    choose; `is_special`: whether there is a special token of this spelling."""

    def __init__(
        self,
        format: Format | None,
        checker: FormChecker,
        *,
        allows_auto: bool,
        is_special: Callable[[str], bool],
    ) -> None:
        self._format = format
        self._checker = checker
        self._allows_auto = allows_auto
        self._is_special = is_special

    async def plan(self, body: ChatBody, form: Form | None) -> ToolPlan | None:
        """None where nothing may be called. `form`: of the text, should the model not call. Raises ApiError."""
        if not body.tools:
            _require_no_choice(body)
            return None
        functions = _functions(body)
        choice = body.tool_choice or "auto"
        if choice == "none":
            return None
        format = self._check_format(choice)
        if isinstance(choice, NamedChoice):
            functions = {choice.function.name: _named(choice, functions)}
        names = tuple(functions)
        grammar = await self._grammar(body, choice, functions, format, form)
        if grammar and body.ignore_eos:
            raise refused("an answer that must call ends with the end-of-sequence token", "ignore_eos")
        if grammar:
            await self._checker.check(grammar, "tools")
        return ToolPlan(grammar=grammar, format=format, names=names)

    def _check_format(self, choice: object) -> Format:
        if self._format is None:
            raise unsupported(
                "tools: this model's chat template shows no way of calling that is known here; the operator can name"
                " one with --tool-call-parser",
                "tools",
            )
        if choice == "auto" and not self._allows_auto:
            raise unsupported(
                "tool_choice: auto, which is also the default, is switched off here; choose required, none or a"
                " function",
                "tool_choice",
            )
        return self._format

    async def _grammar(
        self,
        body: ChatBody,
        choice: object,
        functions: Mapping[str, tuple[int, Function]],
        format: Format,
        form: Form | None,
    ) -> str:
        is_free = choice == "auto"
        is_parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedChoice)
        is_strict = any(function.strict for _, function in functions.values())
        if is_free and form is None and is_parallel and not is_strict:
            return ""
        grammar = CallGrammar(
            format=format,
            schemas={
                name: await self._schema(place, function, is_bound=not is_free)
                for name, (place, function) in functions.items()
            },
            is_parallel=is_parallel,
            is_special=self._is_special,
        )
        if not is_free:
            return grammar.required()
        if form is None:
            return grammar.optional()
        if not form.is_json or not format.opening:  # JSON or a call, and both begin with {
            raise refused(
                "does not go with tools that this model may choose to call; set tool_choice to none or required",
                form.param,
            )
        return grammar.instead_of(form.rule)

    async def _schema(self, place: int, function: Function, *, is_bound: bool) -> Mapping[str, Any]:
        """What a function's arguments are held to: those of strict ones to their schema or it is refused, those that
        must be called to theirs where it can be followed, others to being an object."""
        if not function.strict and not is_bound:
            return _ANY_OBJECT
        schema = function.parameters if function.parameters is not None else _NO_ARGUMENTS
        param = f"tools[{place}].function.parameters"
        try:
            form = json_form(dict(schema), param)
            await self._checker.check(form.grammar, param)
        except ApiError:
            if function.strict:
                raise
            return _ANY_OBJECT
        return schema


def _require_no_choice(body: ChatBody) -> None:
    if body.tool_choice not in (None, "none"):
        raise refused("there are no tools to choose from", "tool_choice")


def _functions(body: ChatBody) -> dict[str, tuple[int, Function]]:
    """By name, each with its place in `tools`."""
    found: dict[str, tuple[int, Function]] = {}
    for place, tool in enumerate(body.tools or ()):
        if tool.function.name in found:
            name = tool.function.name
            raise refused(f"there are two functions {name!r}", f"tools[{place}].function.name")
        found[tool.function.name] = place, tool.function
    return found


def _named(choice: NamedChoice, functions: Mapping[str, tuple[int, Function]]) -> tuple[int, Function]:
    name = choice.function.name
    if name not in functions:
        offered = ", ".join(functions)
        raise refused(f"there is no function {name!r} among {offered}", "tool_choice")
    return functions[name]
