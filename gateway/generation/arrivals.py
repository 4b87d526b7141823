"""Tokens of one choice as they arrive from workers, and the text that they make: each index once and in order. Pure.

The rule: a token is accepted when its index is the next one, ignored when lower; one that is higher waits for the
prefill worker's (two workers send on two connections) and is otherwise missing for good. Does not know where attempts
run or why they end.
"""

from __future__ import annotations

from gateway.generation.detokenize import TextOutput
from gateway.generation.events import Piece
from protocol.request import FinishReason, Token


class Arrivals:
    """Tokens and text of one choice, over all its attempts."""

    def __init__(self, output: TextOutput, index: int = 0, num_known: int = 0) -> None:
        """`index`: of the choice in the reply. `num_known`: first tokens that the client has."""
        self._index = index
        self._num_known = num_known
        self.generated: list[int] = []  # token ids accepted, in index order
        self.first_index = 0  # of the first token of this attempt
        self._output = output
        self._early: dict[int, Token] = {}  # from decode, before this attempt's first

    @property
    def num_of_attempt(self) -> int:
        """Tokens that this attempt has brought."""
        return len(self.generated) - self.first_index

    @property
    def awaits_first(self) -> bool:
        """Whether tokens wait for the one of the prefill worker."""
        return bool(self._early)

    def begin_attempt(self) -> None:
        """What comes now follows what there is."""
        self._early.clear()
        self.first_index = len(self.generated)

    def give_up(self) -> None:
        """Nothing is waited for any more."""
        self._early.clear()

    def in_order(self, tokens: tuple[Token, ...]) -> list[Token] | None:
        """The tokens that follow those accepted; None when one is missing for good."""
        accepted: list[Token] = []
        following = len(self.generated)
        for token in tokens:
            if token.index == following:
                accepted.append(token)
                following += 1
                while (waiting := self._early.pop(following, None)) is not None:
                    accepted.append(waiting)
                    following += 1
            elif token.index > following:
                if following > self.first_index:
                    return None
                self._early[token.index] = token
        if self._early and following > self.first_index:
            return None
        return accepted

    def accept(self, tokens: list[Token]) -> list[Piece]:
        """What at least one token in order comes to; what the client has already is apart."""
        border = sum(token.index < self._num_known for token in tokens)
        accepted: list[Piece] = []
        for part, is_known in ((tokens[:border], True), (tokens[border:], False)):
            if part and not (accepted and accepted[-1].finish_reason):
                text, taken, reason = self._read(part)
                self.generated += (token.token_id for token in taken)
                accepted.append(
                    Piece(
                        index=self._index,
                        text=text,
                        tokens=tuple(taken),
                        finish_reason=reason,
                        is_known=is_known,
                    )
                )
        return accepted

    def _read(self, tokens: list[Token]) -> tuple[str, list[Token], FinishReason | None]:
        output = self._output
        parts: list[str] = []
        for count, token in enumerate(tokens, start=1):
            # The text of a stop token is no output.
            if token.finish_reason is not FinishReason.STOP or output.includes_stop:
                parts.append(output.push(token.token_id))
            if output.stopped:
                return "".join(parts), tokens[:count], FinishReason.STOP
            if token.finish_reason is not None:
                parts.append(output.finish())
                reason = FinishReason.STOP if output.stopped else token.finish_reason
                return "".join(parts), tokens[:count], reason
        return "".join(parts), tokens, None

    def validate(self, max_tokens: int) -> None:
        """Raises AssertionError where this contradicts itself."""
        assert len(self.generated) <= max_tokens
        assert self.first_index <= len(self.generated)
