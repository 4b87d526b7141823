"""Grammars of answers that call: what must be called is called, with arguments as its function wants them.

Pure text; `protocol.grammar` has the language.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tools.formats import Format
from gateway.wishes.forms import json_rule, text_rule

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
