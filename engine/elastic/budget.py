"""Who may have how much physical memory: frames, floors and ceilings. Pure arithmetic over counts.

Its rule: no frame is given to a model if the others' floors could then no longer be met, nor beyond its ceiling. While
a model waits, one that holds more than it gets nothing beyond its own floor, so that nobody starves (max-min).
Does not know pages or blocks; a model's figures are whole pages in frames already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class Share:
    """One model's part, in frames."""

    floor: int  # always to be had
    ceiling: int  # never exceeded by what is given; what is held may be more after it was lowered
    held: int = 0  # mapped, or about to be
    empty: int = 0  # of those, what could be unmapped at once: no block in use, not pinned
    wanted: int = 0  # what the model waits for, beyond what it holds

    @property
    def unmet(self) -> int:
        """What the floor promises and the model does not hold yet."""
        return max(0, self.floor - self.held)

    @property
    def spare(self) -> int:
        """Empty frames above the floor: whoever needs them may take them."""
        return max(0, min(self.empty, self.held - self.floor))

    @property
    def excess(self) -> int:
        """What is held above the ceiling, to be given back as blocks are freed."""
        return max(0, self.held - self.ceiling)


class Budget:
    """`num_frames` frames among the shares."""

    def __init__(self, num_frames: int, shares: Iterable[Share] = ()) -> None:
        """`shares`: of others, who check them; seen while they change, they need not fit together."""
        if num_frames < 1:
            raise ValueError(f"a budget needs at least one frame, not {num_frames}")
        self.num_frames = num_frames
        self._shares = list(shares)

    def add(self, share: Share) -> None:
        self.check(share.floor, share.ceiling, others=self._shares)
        self._shares.append(share)

    def remove(self, share: Share) -> None:
        if share.held:
            raise ValueError(f"the model still holds {share.held} frames")
        self._shares.remove(share)

    def change(self, share: Share, floor: int, ceiling: int) -> None:
        """From now on. What others hold beyond their floors is not taken from them: a floor that was raised is met as
        they free it, a ceiling that was lowered as the model itself does."""
        self.check(floor, ceiling, others=self._others(share))
        share.floor, share.ceiling = floor, ceiling

    def resize(self, num_frames: int) -> None:
        """Raises ValueError, and changes nothing, when it cannot hold all floors."""
        floors = sum(share.floor for share in self._shares)
        if num_frames < max(1, floors):
            raise ValueError(f"all floors together are {floors} of {num_frames} frames")
        self.num_frames = num_frames

    def check(self, floor: int, ceiling: int, *, others: Iterable[Share]) -> None:
        """Raises ValueError for figures that could never be kept."""
        if not 0 <= floor <= ceiling:
            raise ValueError(f"a floor of {floor} frames and a ceiling of {ceiling}")
        floors = floor + sum(other.floor for other in others)
        if floors > self.num_frames:
            raise ValueError(f"all floors together are {floors} of {self.num_frames} frames")

    @property
    def free(self) -> int:
        """Held by nobody; negative while more is held than there should be (`resize`)."""
        return self.num_frames - sum(share.held for share in self._shares)

    @property
    def committed(self) -> int:
        """Held, or promised by a floor."""
        return sum(max(share.held, share.floor) for share in self._shares)

    def most(self, share: Share) -> int:
        """Frames that the model could ever hold as the figures are."""
        floors = sum(other.floor for other in self._others(share))
        return min(share.ceiling, self.num_frames - floors)

    def room(self, share: Share) -> int:
        """Frames that the model may take now, others' empty ones included."""
        return self._room(share, self.free + sum(other.spare for other in self._others(share)))

    def room_untouched(self, share: Share) -> int:
        """Frames that it may take without anybody giving any back."""
        return self._room(share, self.free)

    def owed(self, share: Share) -> int:
        """Frames that the others' floors still need."""
        return sum(other.unmet for other in self._others(share))

    def _room(self, share: Share, within_reach: int) -> int:
        beyond = 0 if self._holds_most(share) else within_reach - self.owed(share)
        room = max(beyond, min(within_reach, share.unmet))
        return max(0, min(room, share.ceiling - share.held))

    def _holds_most(self, share: Share) -> bool:
        """Whether another waits that holds less."""
        return any(self.lacking(o) and share.held > o.held for o in self._others(share))

    def lacking(self, share: Share) -> int:
        """What the model waits for and may come to hold."""
        if not share.wanted:
            return 0
        return max(0, min(share.wanted, self.most(share) - share.held))

    def spare_asked(self, share: Share) -> int:
        """Frames above its floor that this model should give, if nothing in use lies in them: what another lacks and
        cannot take now, or what is held too much. Who lacks some itself gives only to who holds less, until both hold
        alike."""
        asked = -self.free
        for other in self._others(share):
            missing = self.lacking(other) - self.room_untouched(other)
            if self.lacking(share):
                missing = min(missing, (share.held - other.held) // 2)
            asked = max(asked, missing)
        return max(0, min(asked, share.held - share.floor))

    def asked_back(self, share: Share) -> int:
        """Frames that this model should free for those that wait, or because there are fewer. Only who holds most is
        asked, for no more than makes both hold alike, and never for what lies under its floor."""
        givers = [each for each in self._shares if not self.lacking(each)] or self._shares
        if share not in givers or any(each.held > share.held for each in givers):
            return 0
        asked = -self.free - sum(each.spare for each in self._shares)
        for other in self._others(share):
            missing = self.lacking(other) - self.room(other)
            asked = max(asked, min(missing, (share.held - other.held) // 2))
        return max(0, min(asked, share.held - share.floor))

    def _others(self, share: Share) -> list[Share]:
        return [other for other in self._shares if other is not share]

    def validate(self, num_alive: int) -> None:
        """Raises AssertionError unless nobody holds what is not there; `num_alive` frames exist."""
        assert sum(share.held for share in self._shares) <= num_alive, "more is held than exists"
        for share in self._shares:
            assert 0 <= share.empty <= share.held, f"empty frames that are not held: {share}"
            assert 0 <= share.floor <= share.ceiling, f"a floor above its ceiling: {share}"
            assert share.wanted >= 0, f"a negative wish: {share}"
