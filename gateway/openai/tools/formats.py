"""How families of models write tool calls, read piece by piece from their text, and which way a chat template teaches.
Pure.

**Pieces do not matter**: any way of cutting the text up gives the same content and the same calls. Text that may
begin a call is held back; white space before a call belongs to nobody.

**What is no call is content.** A call breaks where its JSON does, where its name is none that is offered, or where its
arguments are no object; all of it is content then. An *eager* parser, for streams, hands out a call as soon as it is
certain to be one, and what it has handed out stands; a patient one waits for the call's end. On calls that do not break
they agree, and so they do on one that is cut off by the limit of tokens, which both give as far as it goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gateway.openai.tools.call_reader import CallReader


@dataclass(slots=True)
class Called:
    """What was told of one call."""

    name: str | None = None  # of its function, where the call begins here
    arguments: str = ""  # more of them; they are one JSON object in all, as the model wrote it


@dataclass(slots=True)
class Told:
    """What has become certain."""

    content: str = ""  # text that belongs to no call
    calls: dict[int, Called] = field(default_factory=dict)  # by their index in the message


SPACE = " \t\n\r"


class ToolParser(ABC):
    """What formats share: a call under way. One parser reads one message."""

    arguments_keys: Collection[str] = ("arguments", "parameters")

    def __init__(self, names: Collection[str], *, is_eager: bool) -> None:
        """`names` of the functions that are offered."""
        self._names = names
        self._is_eager = is_eager
        self._rest = ""  # text that has not been decided upon
        self._call: CallReader | None = None
        self._raw = ""  # of the call under way, with what led to it
        self._waiting = ""  # arguments of the call under way that nobody knows of
        self._is_told = False  # whether somebody knows of the call under way
        self._out = Told()
        self.num_calls = 0  # that have been handed out

    def push(self, text: str) -> None:
        self._rest += text
        self._run(is_final=False)

    def finish(self, *, is_cut: bool) -> None:
        """The end. `is_cut`: by the limit of tokens."""
        self._run(is_final=True)
        if (call := self._call) is not None:
            (self._end_call if is_cut and call.is_certain else self._give_up)(call)

    def taken(self) -> Told:
        """What has become certain since the last time."""
        out, self._out = self._out, Told()
        return out

    def _run(self, *, is_final: bool) -> None:
        goes_on = True
        while goes_on:
            call = self._call
            goes_on = self._look(is_final=is_final) if call is None else self._read_call(call)

    @abstractmethod
    def _look(self, *, is_final: bool) -> bool:
        """Between calls: takes what is decided off `_rest`, says content or begins a call. `is_final`: no more comes.
        Whether there is something to be done with what is left."""

    @abstractmethod
    def _call_ended(self) -> None:
        """A call is complete; the format goes on behind it."""

    @abstractmethod
    def _call_broke(self) -> None:
        """A call broke; the format goes on with what broke it."""

    # -- content

    def _say(self, text: str) -> None:
        self._out.content += text

    # -- a call

    def _begin_call(self, lead: str) -> None:
        """`lead`: text before it that is content should it turn out to be none."""
        self._call, self._raw = CallReader(self._names, self.arguments_keys), lead
        self._waiting, self._is_told = "", False

    def _read_call(self, call: CallReader) -> bool:
        """Whether it is over, and there may be something behind it."""
        end = call.read(self._rest, 0)
        self._raw += self._rest[:end]
        self._rest = self._rest[end:]
        self._waiting += call.take_arguments()
        if self._is_eager and call.is_certain and (self._waiting or not self._is_told):
            self._tell(call)
        if call.is_broken:
            self._give_up(call)
            self._call_broke()
        elif call.is_complete:
            self._end_call(call)
            self._call_ended()
        return call.is_broken or call.is_complete

    def _tell(self, call: CallReader) -> None:
        """What has become certain of a call."""
        told = self._out.calls.setdefault(self.num_calls, Called())
        if not self._is_told:
            told.name, self._is_told = call.name, True
        told.arguments += self._waiting
        self._waiting = ""

    def _end_call(self, call: CallReader) -> None:
        self._call = None
        if self._waiting or not self._is_told:
            self._tell(call)
        self.num_calls += 1

    def _give_up(self, call: CallReader) -> None:
        """What was read is content, unless somebody knows it as a call, which then ends here."""
        if self._is_told:
            self._end_call(call)
        else:
            self._call = None
            self._say(self._raw)


def held(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way of writing calls, as a model does that was trained to it."""

    parser: type[ToolParser]
    arguments_key: str
    between: str  # two calls
    opening: str = ""  # tag before a call; may be a token of its own
    closing: str = ""

    @property
    def padding(self) -> str:
        """Between tags and call."""
        return "\n" if self.opening else ""


FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        parser=HermesParser,
        arguments_key="arguments",
        between="\n",
        opening=OPENING,
        closing=CLOSING,
    ),
    "llama3_json": Format(parser=Llama3JsonParser, arguments_key="parameters", between="; "),
}

# Formats that have the tags of Hermes around something else than JSON.
_OTHERS = ("<function=", "<arg_key>")


def format_of(name: str, template: str | None) -> Format | None:
    """What --tool-call-parser means for a model with this chat template; None = calls are not read."""
    return detect(template) if name == "auto" else FORMATS.get(name)


def detect(template: str | None) -> Format | None:
    """The format that a chat template's text shows the model; None where it shows none that is known."""
    if template is None or any(mark in template for mark in _OTHERS):
        return None
    if OPENING in template:
        return FORMATS["hermes"]
    if PYTHON_TAG in template or ('"name"' in template and '"parameters"' in template):
        return FORMATS["llama3_json"]
    return None
