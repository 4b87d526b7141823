"""From a model's text, piece by piece, to content and tool calls. A pure state machine.

**Pieces do not matter**: any way of cutting the text up gives the same content and the same calls. Text that may
begin a call is held back; white space before a call belongs to nobody.

**What is no call is content.** A call breaks where its JSON does, where its name is none that is offered, or where its
arguments are no object; all of it is content then. An *eager* parser, for streams, hands out a call as soon as it is
certain to be one, and what it has handed out stands; a patient one waits for the call's end. On calls that do not break
they agree, and so they do on one that is cut off by the limit of tokens, which both give as far as it goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from gateway.openai.tools.call_reader import CallReader


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of this function; what follows are its arguments."""

    index: int  # of the call in its message
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which are one JSON object in all, as the model wrote it."""

    index: int
    text: str


Event = Content | CallStarted | Arguments


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
        self._waiting: list[Event] = []  # of the call under way, for a patient parser
        self._is_told = False  # whether somebody knows of the call under way
        self._out: list[Event] = []
        self.num_calls = 0  # that have been handed out

    def push(self, text: str) -> list[Event]:
        """What is certain now. The text of content and arguments comes in as many events as it likes."""
        self._rest += text
        self._run(is_final=False)
        return self._taken()

    def finish(self, *, is_cut: bool) -> list[Event]:
        """The end. `is_cut`: by the limit of tokens."""
        self._run(is_final=True)
        if self._call is not None:
            self._end_unfinished(self._call, is_cut=is_cut)
        return self._taken()

    def _taken(self) -> list[Event]:
        out, self._out = self._out, []
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
        if text:
            self._out.append(Content(text))

    # -- a call

    def _begin_call(self, lead: str) -> None:
        """`lead`: text before it that is content should it turn out to be none."""
        self._call, self._raw = CallReader(self._names, self.arguments_keys), lead
        self._waiting, self._is_told = [], False

    def _read_call(self, call: CallReader) -> bool:
        """Whether it is over, and there may be something behind it."""
        end = call.read(self._rest, 0)
        self._raw += self._rest[:end]
        self._rest = self._rest[end:]
        self._tell(call)
        if call.is_broken:
            self._give_up()
            self._call_broke()
        elif call.is_complete:
            self._call = None
            self._hand_out()
            self._call_ended()
        return call.is_broken or call.is_complete

    def _tell(self, call: CallReader) -> None:
        """What has become certain of a call."""
        if not call.is_certain:
            return
        if not self._waiting and not self._is_told:
            self._waiting.append(CallStarted(self.num_calls, call.name or ""))
        if arguments := call.take_arguments():
            self._waiting.append(Arguments(self.num_calls, arguments))
        if self._is_eager:
            self._is_told = True
            self._out += self._waiting
            self._waiting = []

    def _hand_out(self) -> None:
        self._out += self._waiting
        self._waiting = []
        self.num_calls += 1

    def _give_up(self) -> None:
        """What was read is content, unless somebody knows it as a call, which then ends here."""
        self._call = None
        if self._is_told:
            self._hand_out()
        else:
            self._say(self._raw)

    def _end_unfinished(self, call: CallReader, *, is_cut: bool) -> None:
        if is_cut and call.is_certain:
            self._call = None
            self._hand_out()
        else:
            self._give_up()


def held(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
