"""Calls as Llama 3 writes them: the whole message is `{"name": …, "parameters": {…}}`, or several with `;` between,
perhaps behind `<|python_tag|>`. A message that begins otherwise has no calls."""

from __future__ import annotations

from gateway.tools.parser import SPACE, ToolParser

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = SPACE + ";"


class Llama3JsonParser(ToolParser):
    """What follows something that is no call is content to the end."""

    _is_plain = False

    def _look(self, *, is_final: bool) -> bool:
        if self._is_plain:
            self._say(self._rest)
            self._rest = ""
            return False
        text = self._rest.lstrip(_BETWEEN if self.num_calls else SPACE)
        lead = self._rest[: len(self._rest) - len(text)]
        tagged = text.startswith(PYTHON_TAG)
        body = text.removeprefix(PYTHON_TAG).lstrip(SPACE)
        if body.startswith("{"):
            self._rest = body
            self._begin_call(lead + text[: len(text) - len(body)])
            return True
        if is_final and not text and self.num_calls:
            self._rest = ""  # white space behind the last call
        elif is_final or (body if tagged else not PYTHON_TAG.startswith(text)):
            self._is_plain = True
        return self._is_plain

    def _call_ended(self) -> None:
        pass

    def _call_broke(self) -> None:
        self._is_plain = True
