"""Messages in the harmony format of gpt-oss: channels of reasoning, answers and calls. Pure.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning; `final` and `commentary` are content, unless addressed to a function that is offered. A
message without channels is content. An eager parser, for streams, reports a call from its beginning; a patient one only
calls whose arguments are an object, or that were cut off.
"""

import json
import re
from collections.abc import Collection

from moonserve.gateway.text.message_parser import SPACE, CallDelta, MessageParser, held_back, is_object

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BODY_END = re.compile("|".join(map(re.escape, (*_ENDS, _START, _CHANNEL))))
_HEADERS = (_START, _CHANNEL, _MESSAGE, "to=", "<|constrain|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.\-]+)")

MARKS = (_START, _CHANNEL, _MESSAGE)
THINKING = '(<|channel|> ("analysis" | "commentary") <|message|> /(.|\\n)*/ <|end|> <|start|> "assistant")*'
"""Rule of what may precede an answer or a call, in the language of `protocol.grammar`."""
FINAL = '<|channel|> "final" <|message|>'


def call_rule(name: str, arguments: str) -> str:
    """Returns the rule of a call of a function whose arguments follow a rule."""
    return f'<|channel|> {json.dumps(f"commentary to=functions.{name} ")} <|constrain|> "json" <|message|> {arguments}'


class HarmonyParser(MessageParser):
    def __init__(self, names: Collection[str], *, is_eager: bool) -> None:
        """`names`: functions that are offered."""
        super().__init__()
        self._names = names
        self._is_eager = is_eager
        self._undecided = ""
        self._header: str | None = ""  # text of the current header; None = in a body
        self._is_plain = False  # all text from here on is content
        self._channel = ""
        self._call: str | None = None  # function that the current body calls
        self._arguments = ""
        self._is_reported = False
        self._separator = {"analysis": "", "final": ""}  # between the texts of two bodies of a kind

    def start(self, prompt: str) -> None:
        _, marker, beginning = prompt.rpartition(_START)
        if marker and _CHANNEL in beginning:
            self.push(beginning.removeprefix("assistant"))
            self.take_output()

    def push(self, text: str) -> None:
        self._undecided += text
        while self._advance(is_final=False):
            pass

    def finish(self, *, is_cut: bool) -> None:
        while self._advance(is_final=True):
            pass
        if self._header is None:
            self._end_body(is_cut=is_cut)
        elif not self._is_plain and not any(mark in self._header for mark in MARKS):
            self._output.content += self._header

    def _advance(self, *, is_final: bool) -> bool:
        """Processes text up to the next mark. Returns True if more can be processed."""
        if self._is_plain:
            self._output.content, self._undecided = self._output.content + self._undecided, ""
            return False
        return self._read_header(is_final=is_final) if self._header is not None else self._read_body(is_final=is_final)

    def _read_header(self, *, is_final: bool) -> bool:
        text, self._undecided = (self._header or "") + self._undecided, ""
        lead = text.lstrip(SPACE)
        if lead.startswith(_HEADERS):
            self._header, marker, body = text.partition(_MESSAGE)
            if marker:
                self._begin_body(self._header, body)
            return bool(marker)
        self._header = text
        if not is_final and any(mark.startswith(lead) for mark in _HEADERS):
            return False
        self._is_plain, self._undecided = True, text
        return True

    def _begin_body(self, header: str, body: str) -> None:
        self._undecided, self._header = body, None
        found = _RECIPIENT.search(header)
        self._call = found[1] if found and found[1] in self._names else None
        self._channel = "analysis" if f"{_CHANNEL}analysis" in header else "final"
        self._arguments, self._is_reported = "", False

    def _read_body(self, *, is_final: bool) -> bool:
        end = _BODY_END.search(self._undecided)
        if end is None:
            keep = 0 if is_final else held_back(self._undecided, (*_ENDS, _START, _CHANNEL))
            position = len(self._undecided) - keep
            self._add(self._undecided[:position])
            self._undecided = self._undecided[position:]
            return False
        self._add(self._undecided[: end.start()])
        self._end_body(is_cut=False)
        self._header, self._undecided = "", self._undecided[end.start() if end[0] not in _ENDS else end.end() :]
        return True

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._call is None:
            self._add_text(self._channel, text)
            return
        self._arguments += text
        if self._is_eager:
            self._report(text)

    def _add_text(self, channel: str, text: str) -> None:
        text, self._separator[channel] = self._separator[channel] + text, ""
        if channel == "analysis":
            self._output.reasoning += text
        else:
            self._output.content += text

    def _report(self, arguments: str) -> None:
        delta = self._output.calls.setdefault(self.num_calls, CallDelta())
        if not self._is_reported:
            delta.name, self._is_reported = self._call, True
        delta.arguments += arguments

    def _end_body(self, *, is_cut: bool) -> None:
        if self._call is None:
            self._separator[self._channel] = "\n"
            return
        if not self._is_reported and (is_cut or is_object(self._arguments)):
            self._report(self._arguments)
        if self._is_reported:
            self.num_calls += 1
        else:
            self._add_text("final", self._arguments)
