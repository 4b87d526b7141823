"""Sets of block numbers and the free space of a pool, in Python: what `blocks.h` does, block by block the same."""

from __future__ import annotations

WORD = 64
PROBES = 8
_FULL_WORD = 2**WORD - 1
_ALIGNED = (
    _FULL_WORD,
    0x5555555555555555,
    0x1111111111111111,
    0x0101010101010101,
    0x0001000100010001,
    0x0000000100000001,
    1,
)


def lowest_bit(word: int) -> int:
    return (word & -word).bit_length() - 1


class Bits:
    """A set of numbers below `size`: a bit each and, above, a bit per word that is not empty."""

    def __init__(self, size: int) -> None:
        self.count = 0
        self.levels: list[list[int]] = []
        while not self.levels or size > 1:
            size = -(-size // WORD)
            self.levels.append([0] * size)

    def __contains__(self, at: int) -> bool:
        return bool(self.levels[0][at // WORD] >> at % WORD & 1)

    def add(self, at: int) -> None:
        self.count += 1
        for level in self.levels:
            before = level[at // WORD]
            level[at // WORD] = before | 1 << at % WORD
            if before:
                return
            at //= WORD

    def remove(self, at: int) -> None:
        self.count -= 1
        for level in self.levels:
            level[at // WORD] &= ~(1 << at % WORD)
            if level[at // WORD]:
                return
            at //= WORD

    def first(self, at: int = 0) -> int | None:
        """The lowest member from `at` on."""
        for number, level in enumerate(self.levels):
            if at // WORD >= len(level):
                return None
            word = level[at // WORD] >> at % WORD << at % WORD
            if word:
                at = at // WORD * WORD + lowest_bit(word)
                for below in reversed(self.levels[:number]):
                    at = at * WORD + lowest_bit(below[at])
                return at
            at = at // WORD + 1
        return None

    def last(self) -> int | None:
        """The highest member."""
        if not self.count:
            return None
        at = 0
        for level in reversed(self.levels):
            at = at * WORD + level[at].bit_length() - 1
        return at

    def run(self, at: int, most: int) -> int:
        """Members from `at` on without a gap, `most` at most."""
        length = 0
        while length < most and (at + length) // WORD < len(self.levels[0]):
            if at + length not in self:
                break
            length += 1
        return length

    def validate(self) -> None:
        assert self.count == sum(word.bit_count() for word in self.levels[0]), "count drifted"
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            for at, word in enumerate(below):
                assert (level[at // WORD] >> at % WORD & 1) == (word != 0), "levels disagree"


class Space:
    """Which blocks are free, which words of them are whole, and which blocks are retired."""

    def __init__(self, max_blocks: int) -> None:
        self.free = Bits(max_blocks)
        self.whole = Bits(-(-max_blocks // WORD))
        self.retired = Bits(max_blocks)
        self._hints = [0] * len(_ALIGNED)  # by level: the word from which on a chunk is looked for

    def take(self, first: int, count: int) -> None:
        for block in range(first, first + count):
            if self.free.levels[0][block // WORD] == _FULL_WORD:
                self.whole.remove(block // WORD)
            self.free.remove(block)

    def give(self, first: int, count: int) -> None:
        for block in range(first, first + count):
            self.free.add(block)
            if self.free.levels[0][block // WORD] == _FULL_WORD:
                self.whole.add(block // WORD)

    def find(self, want: int) -> int:
        """Where `want` blocks lie side by side, or as many as a bounded search finds. Something is free."""
        if want <= 1:
            return _there(self.free.first())
        if want > WORD and (whole := self._whole_words(want)) is not None:
            return whole
        most = min(want - 1, WORD - 1).bit_length()
        level, place = self._next_chunk(most)
        if level < most and (first := self.whole.first()) is not None:
            self._hints[most] = first
            return first * WORD
        return place

    def _whole_words(self, want: int) -> int | None:
        needed, longest, best = -(-want // WORD), 0, None
        at = self.whole.first()
        for _ in range(PROBES):
            if at is None or longest == needed:
                break
            length = self.whole.run(at, needed)
            if length > longest:
                longest, best = length, at
            at = self.whole.first(at + length)
        return None if best is None else best * WORD

    def _next_chunk(self, most: int) -> tuple[int, int]:
        """The level of the largest aligned chunk, `most` at most, in the next words with free blocks, in a circle; and
        where it begins."""
        best, place = -1, 0
        at = self.free.first(self._hints[most] * WORD)
        for _ in range(PROBES):
            if best == most:
                break
            word = _there(self.free.first() if at is None else at) // WORD
            level, offset = largest_chunk(self.free.levels[0][word], most)
            if level > best:
                best, place = level, word * WORD + offset
            at = self.free.first((word + 1) * WORD)
            self._hints[most] = word if level == most else (at or 0) // WORD
        return best, place

    def validate(self, end: int) -> None:
        for bits in (self.free, self.whole, self.retired):
            bits.validate()
        for at, word in enumerate(self.free.levels[0]):
            assert (word == _FULL_WORD) == (at in self.whole), "a whole word is not known as such"
            assert not word & self.retired.levels[0][at], "a retired block is free"
        for bits in (self.free, self.retired):
            assert (bits.last() or 0) < max(end, 1), "a block lies beyond the end"


def _there(block: int | None) -> int:
    assert block is not None, "nothing is free"
    return block


def largest_chunk(word: int, most: int) -> tuple[int, int]:
    """The level of the largest aligned chunk of 2**level blocks in a word (not 0), and where it begins."""
    level = 0
    while level < most and (larger := word & word >> (1 << level) & _ALIGNED[level + 1]):
        word = larger
        level += 1
    return level, lowest_bit(word)
