"""Tools of a request: the grammar that its calls follow, the parser that reads them, and their form in the reply."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonserve.gateway.errors import ApiError, unsupported
from moonserve.gateway.generation.events import Piece
from moonserve.gateway.openai.reply_format import ChatFormat
from moonserve.gateway.openai.request_schema import ChatBody, Function, NamedChoice
from moonserve.gateway.openai.structured_outputs import (
    ConstraintChecker,
    OutputConstraint,
    json_constraint,
    json_rule,
    refused,
    text_rule,
)
from moonserve.gateway.text import harmony
from moonserve.gateway.text.message_parser import CallDelta, MessageParser, ParsedDelta
from moonserve.gateway.text.tool_call_parsers import FORMATS, HARMONY, CallSyntax
from moonserve.protocol.request import FinishReason

_TEXT = r"/(.|\n)*/"
_TEXT_WITHOUT_CALL = r"/([^{](.|\n)*)?/"  # for formats in which a message that begins with { is a call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Grammar of calls: functions that may be called, and the format."""

    format: CallSyntax
    schemas: Mapping[str, Mapping[str, Any]]  # schemas of arguments, by function name
    is_parallel: bool  # several calls per message are allowed
    tag_rule: Callable[[str], str]  # returns the rule of a tag: its token, or its text

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
        opening = self._tag(self.format.opening)
        lead = f"lead{'[lazy]' if opening == text_rule(self.format.opening) else ''}: TEXT {opening}"
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
        return self.tag_rule(tag) if tag else ""


class HarmonyGrammar(CallGrammar):
    """Grammar of calls in the channels of `gateway.text.harmony`. A message has one call at most."""

    def instead_of(self, rule: str) -> str:
        return super().instead_of(f"({harmony.FINAL} {rule})")

    def optional(self) -> str:
        return self.instead_of(_TEXT)

    def _calls(self) -> str:
        return " | ".join(harmony.call_rule(name, json_rule(schema)) for name, schema in self.schemas.items())

    def _rules(self) -> str:
        return ""


_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """Tools of one request."""

    grammar: str  # grammar of the answers; empty = none
    names: tuple[str, ...]  # names of functions that may be called


@dataclass(frozen=True, slots=True)
class ToolPlanner:
    """Makes the tool plans of one model."""

    format: CallSyntax | None  # None = unknown
    checker: ConstraintChecker
    allows_auto: bool  # the model may choose whether to call
    tag_rule: Callable[[str], str]  # returns the rule of a tag

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
            await self.checker.check(grammar, "tools")
        return ToolPlan(grammar=grammar, names=names)

    def _check_format(self, choice: object) -> CallSyntax:
        if self.format is None:
            raise unsupported(
                "tools: this model's chat template has no known syntax of tool calls; the operator can select"
                " one with --tool-call-parser",
                "tools",
            )
        if choice == "auto" and not self.allows_auto:
            raise unsupported(
                "tool_choice: this server does not allow auto, which is also the default; use required, none or a"
                " function",
                "tool_choice",
            )
        return self.format

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
        grammar = (HarmonyGrammar if format is HARMONY else CallGrammar)(
            format=format,
            schemas={
                name: await self._schema(place, function, is_bound=not is_free)
                for name, (place, function) in functions.items()
            },
            is_parallel=is_parallel,
            tag_rule=self.tag_rule,
        )
        if not is_free:
            return grammar.required()
        if constraint is None:
            return grammar.optional()
        if not constraint.is_json or format is FORMATS["llama3_json"]:  # both begin with {
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
            await self.checker.check(constraint.grammar, param)
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


@dataclass(eq=False)
class ParsedChatFormat(ChatFormat):
    """Chunks of an answer that may contain reasoning and calls. A stream reports a call as soon as it is certain; a
    whole reply only calls that do not break."""

    parsers: Sequence[MessageParser]  # of each choice
    shows_reasoning: bool = field(kw_only=True)
    _reasoning: str = field(default="", init=False)  # of all choices

    def piece(self, piece: Piece) -> str:
        choice, options = self.choice(piece), self.options
        if choice["delta"].get("tool_calls") and choice["finish_reason"]:
            # The openai client ends a call by the reason in a later chunk.
            end = {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            return self._chunk({**choice, "finish_reason": None}) + self._chunk(end)
        shows = choice["delta"] or choice["finish_reason"] or options.token_ids or options.logprobs
        return self._chunk(choice) if shows else ""

    def detailed(self, usage: dict[str, Any]) -> dict[str, Any]:
        num_tokens = len(self.tokenizer.encode(self._reasoning, add_special_tokens=False))
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        parser, reason = self.parsers[piece.index], piece.finish_reason
        parser.push(piece.text)
        if reason is not None:
            parser.finish(is_cut=reason is FinishReason.LENGTH)
        output = parser.take_output()
        self._reasoning += output.reasoning
        if not self.shows_reasoning:
            output.reasoning = ""
        # The finish reason is the calls unless the answer was cut off.
        called = reason is FinishReason.STOP and parser.num_calls
        return _delta_of(output), "tool_calls" if called else reason


def _delta_of(parsed: ParsedDelta) -> dict[str, Any]:
    names = ("reasoning_content", "reasoning") if parsed.reasoning else ()  # DeepSeek's and vLLM's
    delta: dict[str, Any] = dict.fromkeys(names, parsed.reasoning)
    if parsed.content:
        delta["content"] = parsed.content
    if parsed.calls:
        delta["tool_calls"] = [_call(*each) for each in parsed.calls.items()]
    return delta


def _call(index: int, called: CallDelta) -> dict[str, Any]:
    if called.name is None:
        return {"index": index, "function": {"arguments": called.arguments}}
    function = {"name": called.name, "arguments": called.arguments}
    call_id = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": call_id, "type": "function", "function": function}
