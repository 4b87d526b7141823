"""Tokens of one choice as they arrive from workers, and their text: each index once and in order. Pure.

Rule: a token is accepted if its index is the next one and ignored if its index is lower. A token with a higher index
waits for the first token, which the prefill worker sends on another connection; after that first token, a gap means
that a token is lost. This module does not know where attempts run or why they end.
"""

from moonserve.gateway.generation.events import Piece
from moonserve.gateway.text.detokenizer import TextOutput
from moonserve.protocol.request import FinishReason, Token


class OrderedTokens:
    """Tokens and text of one choice over all its attempts."""

    def __init__(self, output: TextOutput, index: int = 0, num_known: int = 0) -> None:
        """`index`: position of the choice in the reply. `num_known`: number of first tokens that the client has."""
        self._index = index
        self._num_known = num_known
        self.generated: list[int] = []  # accepted token ids, in index order
        self.first_index = 0  # index of the first token of this attempt
        self._output = output
        self._early: dict[int, Token] = {}  # tokens from decode, received before this attempt's first token

    @property
    def num_attempt_tokens(self) -> int:
        """Number of tokens that this attempt has produced."""
        return len(self.generated) - self.first_index

    @property
    def awaits_first(self) -> bool:
        """True if tokens are waiting for the prefill worker's first token."""
        return bool(self._early)

    def begin_attempt(self) -> None:
        """Starts a new attempt, whose tokens follow those accepted so far."""
        self._early.clear()
        self.first_index = len(self.generated)

    def discard_early(self) -> None:
        """Discards tokens that wait for an earlier one."""
        self._early.clear()

    def in_order(self, tokens: tuple[Token, ...]) -> list[Token] | None:
        """Returns the tokens that follow the accepted ones, or None if a token is lost."""
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
        """Accepts at least one token in order and returns the pieces made of them. Tokens that the client already has
        form a separate piece."""
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
            # The text of a stop token is not output.
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
        """Raises AssertionError if the state contradicts itself."""
        assert len(self.generated) <= max_tokens
        assert self.first_index <= len(self.generated)
