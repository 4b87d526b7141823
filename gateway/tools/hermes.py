"""Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text."""

from __future__ import annotations

from gateway.tools.parser import SPACE, ToolParser, held

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Text between calls is content."""

    _closes = False  # behind a call, whose closing tag has not come

    def _look(self, *, is_final: bool) -> bool:
        if self._closes:
            return self._skip_closing(is_final=is_final)
        before, marker, after = self._rest.partition(OPENING)
        if marker:
            said = before.rstrip(SPACE)
            self._say(said)
            self._rest = after
            self._begin_call(before[len(said) :] + marker)
            return True
        said = before
        if not is_final:
            said = before[: len(before) - held(before, OPENING)].rstrip(SPACE)
        self._say(said)
        self._rest = before[len(said) :]
        return False

    def _skip_closing(self, *, is_final: bool) -> bool:
        """The tag, with white space before it; a model that forgets it has ended its call all the same."""
        text = self._rest.lstrip(SPACE)
        if text.startswith(CLOSING):
            self._closes, self._rest = False, text[len(CLOSING) :]
        elif is_final or not CLOSING.startswith(text):
            self._closes = False
        return not self._closes

    def _call_ended(self) -> None:
        self._closes = True

    def _call_broke(self) -> None:
        pass
