"""Reasoning between tags before an answer, as `<think>…</think>`. Pure.

Where the prompt already ends with the opening tag, the message begins with reasoning. Anything but the opening tag at
the beginning of a message is an answer without reasoning. White space around both parts is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from moonserve.gateway.text.message_parser import SPACE, MessageParser, ParsedDelta, held_back


class ReasoningState(Enum):
    """Position in a message."""

    POSSIBLE = "reasoning or the answer begins"
    OPEN = "in the reasoning"
    PAST = "in the answer"


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Tags around the reasoning of one family of models."""

    opening: str
    closing: str

    def after(self, prompt: str) -> ReasoningState:
        """Returns the position at the end of a prompt."""
        end = prompt.rstrip(SPACE)
        if end.endswith(self.opening):
            return ReasoningState.OPEN
        return ReasoningState.PAST if end.endswith(self.closing) else ReasoningState.POSSIBLE

    def before_grammar(self, grammar: str, prompt: str, tag: Callable[[str], str], *, is_token: bool) -> str:
        """Returns a grammar of reasoning and an answer that follows `grammar`. `tag`: the rule of a tag, which is one
        token or not."""
        state = self.after(prompt)
        if state is ReasoningState.PAST:
            return grammar
        thinking = "thinking" if state is ReasoningState.OPEN else f"({tag(self.opening)} thinking)?"
        return (
            f"%llguidance {{}}\nstart: {thinking} /[ \\t\\r\\n]{{0,8}}/ answer\n"
            f"thinking{'' if is_token else '[lazy]'}: /(.|\\n)*/ {tag(self.closing)}\n"
            f"answer: %lark {{\n{grammar}\n}}"
        )


TAGS = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
)


class ReasoningParser(MessageParser):
    """Reads the reasoning, and gives the answer to another parser."""

    def __init__(self, tags: ReasoningTags, answer: MessageParser) -> None:
        super().__init__()
        self._tags = tags
        self._answer = answer
        self._state = ReasoningState.POSSIBLE
        self._undecided = ""
        self._has_text = False  # after the last tag, something other than white space has come

    def start(self, prompt: str) -> None:
        self._state = self._tags.after(prompt)

    def push(self, text: str) -> None:
        self._undecided += text
        if self._state is ReasoningState.POSSIBLE:
            beginning = self._undecided.lstrip(SPACE)
            if beginning.startswith(self._tags.opening):
                self._enter(ReasoningState.OPEN, beginning.removeprefix(self._tags.opening))
            elif not self._tags.opening.startswith(beginning):
                self._enter(ReasoningState.PAST, self._undecided)
                self._has_text = True  # an answer without reasoning keeps its white space
        if self._state is ReasoningState.OPEN:
            reasoning, closing, answer = self._undecided.partition(self._tags.closing)
            self._add_reasoning(reasoning, is_whole=bool(closing))
            if closing:
                self._enter(ReasoningState.PAST, answer)
        if self._state is ReasoningState.PAST:
            self._push_answer()

    def finish(self, *, is_cut: bool) -> None:
        if self._state is ReasoningState.OPEN:
            self._add_reasoning(self._undecided, is_whole=True)
        elif self._state is ReasoningState.POSSIBLE:
            self._has_text = True
            self._push_answer()
        self._answer.finish(is_cut=is_cut)

    def take_output(self) -> ParsedDelta:
        output, own = self._answer.take_output(), super().take_output()
        output.reasoning = own.reasoning
        self.num_calls = self._answer.num_calls
        return output

    def _enter(self, state: ReasoningState, rest: str) -> None:
        self._state, self._undecided, self._has_text = state, rest, False

    def _without_lead(self, text: str) -> str:
        text = text if self._has_text else text.lstrip(SPACE)
        self._has_text |= bool(text)
        return text

    def _add_reasoning(self, text: str, *, is_whole: bool) -> None:
        """Emits the certain part of a text; `is_whole`: reasoning ends here."""
        certain = text if is_whole else text[: len(text) - held_back(text, [self._tags.closing])]
        certain = certain.rstrip(SPACE)
        self._undecided = text[len(certain) :]
        self._output.reasoning += self._without_lead(certain)

    def _push_answer(self) -> None:
        text, self._undecided = self._undecided, ""
        if text := self._without_lead(text):
            self._answer.push(text)
