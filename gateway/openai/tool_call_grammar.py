"""Tools of a request: the grammar that its calls follow, the parser that reads them, and their form in the reply."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moonserve.gateway.errors import ApiError, unsupported
from moonserve.gateway.generation.events import Choice, Piece
from moonserve.gateway.generation.tool_call_parsers import CallDelta, CallSyntax, ParsedDelta, ToolParser
from moonserve.gateway.openai.reply_format import ChatFormat, ReplyHeader, ReplyOptions
from moonserve.gateway.openai.request_schema import ChatBody, Function, NamedChoice
from moonserve.gateway.openai.structured_outputs import (
    ConstraintChecker,
    OutputConstraint,
    json_constraint,
    json_rule,
    refused,
    text_rule,
)
from moonserve.gateway.tokenizer import Tokenizer
from moonserve.protocol.request import FinishReason

_TEXT = r"/(.|\n)*/"
_TEXT_WITHOUT_CALL = r"/([^{](.|\n)*)?/"  # for formats in which a message that begins with { is a call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Grammar of calls: functions that may be called, and the format."""

    format: CallSyntax
    schemas: Mapping[str, Mapping[str, Any]]  # schemas of arguments, by function name
    is_parallel: bool  # several calls per message are allowed
    is_special: Callable[[str], bool]  # True if the model has a special token spelled like the argument

    def required(self) -> str:
        """Returns a grammar of calls and nothing else."""
        return f"start: {self._calls()}\n{self._rules()}"

    def instead_of(self, rule: str) -> str:
        """Returns a grammar of either calls or text that follows the rule."""
        return f"start: {rule} | {self._calls()}\n{self._rules()}"

    def optional(self) -> str:
        """Returns a grammar of any text in which calls must be correct."""
        if not self.format.opening:
            return f"start: PLAIN | {self._calls()}\nPLAIN: {_TEXT_WITHOUT_CALL}\n{self._rules()}"
        start = "(lead rest)* TEXT" if self.is_parallel else "TEXT | lead rest"
        # Lazy: text ends at the first occurrence of the tag.
        lazy = "" if self.is_special(self.format.opening) else "[lazy]"
        lead = f"lead{lazy}: TEXT {self._tag(self.format.opening)}"
        # The first line selects llguidance's own dialect.
        return f"%llguidance {{}}\nstart: {start}\n{lead}\nTEXT: {_TEXT}\n{self._rules()}"

    def _calls(self) -> str:
        return f"call ({text_rule(self.format.between)} call)*" if self.is_parallel else "call"

    def _rules(self) -> str:
        """Returns the rules `call` and `rest`, the part of a call after the opening tag."""
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
    """Grammar and parser of one request's answers."""

    grammar: str  # grammar of the answers; empty = none
    format: CallSyntax
    names: tuple[str, ...]  # names of functions that may be called

    def with_visible_tags(self, choices: tuple[Choice, ...], body: ChatBody) -> tuple[Choice, ...]:
        """Returns the choices with special tokens kept in their text, because tags may be special tokens. The client
        can override this."""
        keeps = body.skip_special_tokens is not True
        return tuple(replace(choice, skip_special_tokens=not keeps) for choice in choices)

    def parser(self, *, is_eager: bool) -> ToolParser:
        """Returns a new parser for one answer."""
        return self.format.parser(self.names, is_eager=is_eager)


class ToolPlanner:
    """Makes the tool plans of one model. `format`: None if unknown. `allows_auto`: the model may choose whether to
    call. `is_special`: True for the spelling of a special token."""

    def __init__(
        self,
        format: CallSyntax | None,
        checker: ConstraintChecker,
        *,
        allows_auto: bool,
        is_special: Callable[[str], bool],
    ) -> None:
        self._format = format
        self._checker = checker
        self._allows_auto = allows_auto
        self._is_special = is_special

    async def plan(self, body: ChatBody, constraint: OutputConstraint | None) -> ToolPlan | None:
        """Returns the plan, or None if nothing may be called. `constraint`: of the text if the model does not call.
        Raises ApiError."""
        if not body.tools:
            if body.tool_choice not in (None, "none"):
                raise refused("requires tools", "tool_choice")
            return None
        functions = _functions(body)
        choice = body.tool_choice or "auto"
        if choice == "none":
            return None
        format = self._check_format(choice)
        if isinstance(choice, NamedChoice):
            functions = {choice.function.name: _named(choice, functions)}
        names = tuple(functions)
        grammar = await self._grammar(body, choice, functions, format, constraint)
        if grammar and body.ignore_eos:
            raise refused(
                "cannot be combined with tools: output with a grammar ends with the end-of-sequence token", "ignore_eos"
            )
        if grammar:
            await self._checker.check(grammar, "tools")
        return ToolPlan(grammar=grammar, format=format, names=names)

    def _check_format(self, choice: object) -> CallSyntax:
        if self._format is None:
            raise unsupported(
                "tools: this model's chat template has no known syntax of tool calls; the operator can select"
                " one with --tool-call-parser",
                "tools",
            )
        if choice == "auto" and not self._allows_auto:
            raise unsupported(
                "tool_choice: this server does not allow auto, which is also the default; use required, none or a"
                " function",
                "tool_choice",
            )
        return self._format

    async def _grammar(
        self,
        body: ChatBody,
        choice: object,
        functions: Mapping[str, tuple[int, Function]],
        format: CallSyntax,
        constraint: OutputConstraint | None,
    ) -> str:
        is_free = choice == "auto"
        is_parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedChoice)
        is_strict = any(function.strict for _, function in functions.values())
        if is_free and constraint is None and is_parallel and not is_strict:
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
        if constraint is None:
            return grammar.optional()
        if not constraint.is_json or not format.opening:  # JSON and a call both begin with {
            raise refused(
                "cannot be combined with tool_choice auto for this model; set tool_choice to none or required",
                constraint.param,
            )
        return grammar.instead_of(constraint.rule)

    async def _schema(self, place: int, function: Function, *, is_bound: bool) -> Mapping[str, Any]:
        """Returns the schema enforced on a function's arguments. A strict function's schema is enforced or refused. The
        schema of a function that must be called is enforced if possible. Other arguments must only be an object."""
        if not function.strict and not is_bound:
            return _ANY_OBJECT
        schema = function.parameters if function.parameters is not None else _NO_ARGUMENTS
        param = f"tools[{place}].function.parameters"
        try:
            constraint = json_constraint(dict(schema), param)
            await self._checker.check(constraint.grammar, param)
        except ApiError:
            if function.strict:
                raise
            return _ANY_OBJECT
        return schema


def _functions(body: ChatBody) -> dict[str, tuple[int, Function]]:
    """Returns the functions by name, each with its index in `tools`."""
    found: dict[str, tuple[int, Function]] = {}
    for place, tool in enumerate(body.tools or ()):
        if tool.function.name in found:
            name = tool.function.name
            raise refused(f"function {name!r} is defined twice", f"tools[{place}].function.name")
        found[tool.function.name] = place, tool.function
    return found


def _named(choice: NamedChoice, functions: Mapping[str, tuple[int, Function]]) -> tuple[int, Function]:
    name = choice.function.name
    if name not in functions:
        offered = ", ".join(functions)
        raise refused(f"function {name!r} is not among {offered}", "tool_choice")
    return functions[name]


class ToolCallFormat(ChatFormat):
    """Chunks of an answer that may call. A stream reports a call as soon as it is certain; a whole reply only calls
    that do not break."""

    def __init__(
        self,
        header: ReplyHeader,
        options: ReplyOptions,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[Sequence[int]],
        plan: ToolPlan,
        *,
        is_stream: bool,
    ) -> None:
        super().__init__(header, options, tokenizer, prompt_token_ids)
        self._parsers = [plan.parser(is_eager=is_stream) for _ in prompt_token_ids]

    def piece(self, piece: Piece) -> str:
        choice, options = self.choice(piece), self._options
        if choice["delta"].get("tool_calls") and choice["finish_reason"]:
            # The openai client ends a call by the reason in a later chunk.
            end = {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            return self._chunk({**choice, "finish_reason": None}) + self._chunk(end)
        shows = choice["delta"] or choice["finish_reason"] or options.token_ids or options.logprobs
        return self._chunk(choice) if shows else ""

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        parser, reason = self._parsers[piece.index], piece.finish_reason
        parser.push(piece.text)
        if reason is not None:
            parser.finish(is_cut=reason is FinishReason.LENGTH)
        # The finish reason is the calls unless the answer was cut off.
        called = reason is FinishReason.STOP and parser.num_calls
        return _delta_of(parser.take_output()), "tool_calls" if called else reason


def _delta_of(parsed: ParsedDelta) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": parsed.content} if parsed.content else {}
    if parsed.calls:
        delta["tool_calls"] = [_call(*each) for each in parsed.calls.items()]
    return delta


def _call(index: int, called: CallDelta) -> dict[str, Any]:
    if called.name is None:
        return {"index": index, "function": {"arguments": called.arguments}}
    function = {"name": called.name, "arguments": called.arguments}
    call_id = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": call_id, "type": "function", "function": function}
