"""Formats in which models write tool calls: incremental parsers, and detection by chat template. Pure.

White space before a call is dropped.

**Text that is not a call is content.** A call breaks where its JSON does, where its name is not offered, or where its
arguments are not an object; all of its text is then content. An *eager* parser, for streams, reports a call as soon as
it is certain, and a reported call is not taken back. A patient parser waits for the call's end. Both agree on calls
that do not break, and on a call cut off by the token limit, which both report as far as it goes.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from moonserve.gateway.text.harmony import MARKS, HarmonyParser
from moonserve.gateway.text.message_parser import SPACE, CallDelta, MessageParser, held_back
from moonserve.gateway.text.tool_call_reader import CallReader


class ToolParser(MessageParser):
    """Common part of the formats' parsers: handling of the current call. One parser reads one message."""

    arguments_keys: Collection[str] = ("arguments", "parameters")

    def __init__(self, names: Collection[str], *, is_eager: bool) -> None:
        """`names`: functions that are offered."""
        super().__init__()
        self._names = names
        self._is_eager = is_eager
        self._undecided = ""  # text that is not yet decided
        self._call: CallReader | None = None
        self._raw = ""  # text of the current call, including its lead
        self._pending_arguments = ""  # arguments of the current call that are not yet reported
        self._is_emitted = False  # True if the current call has been reported

    def push(self, text: str) -> None:
        self._undecided += text
        self._run(is_final=False)

    def finish(self, *, is_cut: bool) -> None:
        self._run(is_final=True)
        if (call := self._call) is not None:
            (self._end_call if is_cut and call.is_certain else self._give_up)(call)

    def _run(self, *, is_final: bool) -> None:
        may_continue = True
        while may_continue:
            call = self._call
            may_continue = self._scan(is_final=is_final) if call is None else self._read_call(call)

    @abstractmethod
    def _scan(self, *, is_final: bool) -> bool:
        """Between calls: consumes the decided part of `_undecided`, emits content or begins a call. `is_final`: no text
        follows. Returns True if the rest can be processed further."""

    @abstractmethod
    def _call_over(self, *, is_broken: bool) -> None:
        """Continues after a complete call, or after a broken one at the text that broke it."""

    # -- content

    def _emit_content(self, text: str) -> None:
        self._output.content += text

    # -- a call

    def _begin_call(self, lead: str) -> None:
        """Begins a call. `lead`: text before it that becomes content if this is not a call."""
        self._call, self._raw = CallReader(self._names, self.arguments_keys), lead
        self._pending_arguments, self._is_emitted = "", False

    def _read_call(self, call: CallReader) -> bool:
        """Reads the current call. Returns True if it has ended or broken, so that text may follow."""
        end = call.read(self._undecided, 0)
        self._raw += self._undecided[:end]
        self._undecided = self._undecided[end:]
        self._pending_arguments += call.take_arguments()
        if self._is_eager and call.is_certain and (self._pending_arguments or not self._is_emitted):
            self._emit_call(call)
        is_over = call.is_broken or call.is_complete
        if is_over:
            (self._give_up if call.is_broken else self._end_call)(call)
            self._call_over(is_broken=call.is_broken)
        return is_over

    def _emit_call(self, call: CallReader) -> None:
        """Reports the new certain part of a call."""
        delta = self._output.calls.setdefault(self.num_calls, CallDelta())
        if not self._is_emitted:
            delta.name, self._is_emitted = call.name, True
        delta.arguments += self._pending_arguments
        self._pending_arguments = ""

    def _end_call(self, call: CallReader) -> None:
        self._call = None
        if self._pending_arguments or not self._is_emitted:
            self._emit_call(call)
        self.num_calls += 1

    def _give_up(self, call: CallReader) -> None:
        """Turns the text read into content, unless the call has been reported; then it ends here."""
        if self._is_emitted:
            self._end_call(call)
        else:
            self._call = None
            self._emit_content(self._raw)


OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Parser of calls in `<tool_call>` tags. Text between calls is content."""

    _closes = False  # after a call, while its closing tag is awaited

    def _scan(self, *, is_final: bool) -> bool:
        if self._closes:
            return self._skip_closing(is_final=is_final)
        before, marker, after = self._undecided.partition(OPENING)
        if marker:
            content = before.rstrip(SPACE)
            self._emit_content(content)
            self._undecided = after
            self._begin_call(before[len(content) :] + marker)
            return True
        content = before
        if not is_final:
            content = before[: len(before) - held_back(before, [OPENING])].rstrip(SPACE)
        self._emit_content(content)
        self._undecided = before[len(content) :]
        return False

    def _skip_closing(self, *, is_final: bool) -> bool:
        """Skips the closing tag and white space before it. A missing tag is accepted."""
        text = self._undecided.lstrip(SPACE)
        if text.startswith(CLOSING):
            self._closes, self._undecided = False, text[len(CLOSING) :]
        elif is_final or not CLOSING.startswith(text):
            self._closes = False
        return not self._closes

    def _call_over(self, *, is_broken: bool) -> None:
        self._closes = not is_broken


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = SPACE + ";"


class Llama3JsonParser(ToolParser):
    """Parser of calls as bare JSON. Once something is not a call, all text from there on is content."""

    _is_plain = False

    def _scan(self, *, is_final: bool) -> bool:
        if self._is_plain:
            self._emit_content(self._undecided)
            self._undecided = ""
            return False
        text = self._undecided.lstrip(_BETWEEN if self.num_calls else SPACE)
        lead = self._undecided[: len(self._undecided) - len(text)]
        tagged = text.startswith(PYTHON_TAG)
        body = text.removeprefix(PYTHON_TAG).lstrip(SPACE)
        if body.startswith("{"):
            self._undecided = body
            self._begin_call(lead + text[: len(text) - len(body)])
            return True
        if is_final and not text and self.num_calls:
            self._undecided = ""  # white space after the last call
        elif is_final or (body if tagged else not PYTHON_TAG.startswith(text)):
            self._is_plain = True
        return self._is_plain

    def _call_over(self, *, is_broken: bool) -> None:
        self._is_plain = is_broken


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """One format of calls that models are trained to write."""

    parser: Callable[..., MessageParser]  # of the functions that are offered, and `is_eager`
    arguments_key: str = ""
    between: str = ""  # text between two calls
    opening: str = ""  # tag before a call; may be a single token
    closing: str = ""

    @property
    def padding(self) -> str:
        """Text between the tags and the call."""
        return "\n" if self.opening else ""


HARMONY = CallSyntax(parser=HarmonyParser)

FORMATS: Mapping[str, CallSyntax] = {
    "hermes": CallSyntax(
        parser=HermesParser,
        arguments_key="arguments",
        between="\n",
        opening=OPENING,
        closing=CLOSING,
    ),
    "llama3_json": CallSyntax(parser=Llama3JsonParser, arguments_key="parameters", between="; "),
    "harmony": HARMONY,
}

# Marks of formats that put something other than JSON between the tags of Hermes.
_UNSUPPORTED_MARKS = ("<function=", "<arg_key>")


def select_syntax(name: str, template: str | None) -> CallSyntax | None:
    """Returns the format for --tool-call-parser and the model's chat template; None = calls are not parsed."""
    return detect(template) if name == "auto" else FORMATS.get(name)


def detect(template: str | None) -> CallSyntax | None:
    """Returns the format that a chat template demonstrates; None if it shows no known format."""
    if template is None or any(mark in template for mark in _UNSUPPORTED_MARKS):
        return None
    if all(mark in template for mark in MARKS):
        return HARMONY
    if OPENING in template:
        return FORMATS["hermes"]
    if PYTHON_TAG in template or ('"name"' in template and '"parameters"' in template):
        return FORMATS["llama3_json"]
    return None
