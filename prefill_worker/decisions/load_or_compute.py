"""Choice between reading a stored prefix and computing it again, by predicted time per request. Pure.

The choice is the number of leading *parts* (runs of prefix blocks, one store each) that are read; the rest is computed.
Reading begins at once and overlaps the `busy_s` seconds of computing that are ahead of the request. So the prompt is
computed

    total(m) = max(busy_s, L(m)) + C(m)

seconds from now if the m leading blocks are read. Within a part L(m) = const + m · block_bytes / rate is linear. With
p tokens in the blocks before the part and n tokens in all, C(m) = c0 + c1·(n − p − m·b) + c2·(n² − (p + m·b)²), whose
second derivative −2·c2·b² is never positive. So while reading takes longer than `busy_s`, L + C is concave in m, and
its minimum is at an end: all of the part or nothing. While reading is hidden, the total falls with every further block.
This ignores the point at which reading ceases to be hidden. If computing everything is the better end, a block takes
longer to read than to compute, so that point would gain less than `busy_s`, which the request waits in any case. Parts
build on each other, so only leading ones can be read.

Reading costs the engine nothing, computing delays all requests behind, and both predictions are rough. So computing
must win by a clear margin, and by more than the stalls of a busy machine. This module does not know what other requests
read at the same time, except that measured speeds include it.

**Layer by layer.** A prefix that is read in g turns, with a share of the layers in each, arrives while the tokens
behind it are computed. The first step, of C1 seconds, begins when the first turn has arrived, and its attention to the
last layers begins when the last turn has:

    total(m) = max(max(busy_s, L(m)/g) + C(m), L(m) + C(m) − C1(m)·(1 − 1/g))

This is done if it gains more than the additional cost of g turns. If reading is hidden behind `busy_s` or takes very
little time, all layers are read at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from moonserve.protocol.request import Endpoint
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.store_speed import Speed, StoreSpeeds

# A readable prefix is computed only if the predicted total is at most this share of the total with reading
COMPUTE_IF_BELOW = 0.8
# and at least this much less. Users do not notice less in a TTFT, and reads of a few kilobytes vary by as much.
COMPUTE_IF_GAINS_S = 0.05
# Minimum gain for reading layer by layer: a turn costs a batch and an event, tenths of a millisecond (docs/overlap.md).
LAYERED_IF_GAINS_S = 0.003
# With fewer bytes per turn the fixed cost of a turn exceeds its gain.
MIN_TURN_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """Result of reading one part of a prefix."""

    store: Endpoint
    num_bytes: int  # bytes that arrived; after a failure, bytes requested
    seconds: float
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice:
    """The choice for one request, with the predictions behind it."""

    num_parts: int  # number of leading parts that are read
    part_s: tuple[float, ...]  # predicted time to read each part that was offered
    totals_s: tuple[float, ...]  # predicted time until the prompt is computed, by number of parts read
    layers_at_once: int | None = None  # layers per turn; None = all layers at once

    @property
    def num_skipped(self) -> int:
        """Number of parts that are computed although a store has them."""
        return len(self.part_s) - self.num_parts


def choose(
    part_s: Sequence[float],
    compute_s: Sequence[float],
    busy_s: float,
    gains_s: Sequence[float] | None = None,
) -> LoadChoice:
    """Chooses the number of parts to read. `compute_s[k]`: seconds to compute the rest once k parts are read;
    `gains_s[k]`: seconds by which computing ends sooner if it begins while the k parts are read."""
    read_s = accumulate(part_s, initial=0.0)
    gains = gains_s or [0.0] * len(compute_s)
    totals = [max(busy_s, read) + left - gain for read, left, gain in zip(read_s, compute_s, gains, strict=True)]
    best = min(range(len(totals)), key=lambda k: (totals[k], -k))
    limit = min(COMPUTE_IF_BELOW * totals[-1], totals[-1] - COMPUTE_IF_GAINS_S)
    return LoadChoice(
        num_parts=best if totals[best] <= limit else len(part_s),
        part_s=tuple(part_s),
        totals_s=tuple(totals),
    )


@dataclass(slots=True, eq=False)
class StoreReadStats:
    """Statistics of choices and reads for one store."""

    reads: int = 0
    failures: int = 0
    skipped: int = 0  # parts that were computed instead of read
    num_bytes: int = 0
    seconds: float = 0.0
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerTurns:
    """Rules for cutting a prefix into turns of layers."""

    num_layers: int
    mode: str = "auto"  # "auto" (by predicted gain), "always" or "never"

    def at_once(self, num_bytes: int) -> int:
        """Returns the layers per turn for a prefix of `num_bytes`; all layers if turns would be too small."""
        if self.mode == "never" or num_bytes == 0:
            return self.num_layers
        if self.mode == "always":
            return 1
        layer_bytes = num_bytes / self.num_layers
        return min(math.ceil(MIN_TURN_BYTES / layer_bytes), self.num_layers)

    def gain_s(self, at_once: int, read_s: float, first_step_s: float, busy_s: float) -> float:
        """Returns by how many seconds a prompt is computed sooner than after a complete load: the smaller of the time
        that the first step has computed when the last turn arrives, and the time from the first turn to the last."""
        share = at_once / self.num_layers
        return min(first_step_s * (1 - share), max(read_s - max(busy_s, read_s * share), 0.0))


class PrefixLoads:
    """Makes the choices of one worker and learns store speeds from the reads."""

    def __init__(
        self,
        profile: PrefillProfile,
        layers: LayerTurns,
        *,
        reads: str = "auto",
        block_bytes: int,
        block_size: int,
        chunk_tokens: int,
    ) -> None:
        self.profile = profile
        self._layers = layers
        self._reads = reads  # "auto" (by predicted time), "always" or "never"
        self._chunk_tokens = chunk_tokens
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._speeds = StoreSpeeds()
        self._figures: dict[str, StoreReadStats] = {}

    def choose(
        self,
        offers: Sequence[tuple[Endpoint, int]],
        *,
        reader_host: str,
        num_tokens: int,
        num_cached: int,
        busy_s: float,
        now: float,
    ) -> LoadChoice:
        """Makes the choice for one request. `offers`: store and number of blocks of each part, contiguous from token
        `num_cached` on."""
        part_s = [
            self._speeds.of(store, reader_host, now).seconds(num_blocks * self._block_bytes)
            for store, num_blocks in offers
        ]
        counts = accumulate((num_blocks for _, num_blocks in offers), initial=0)
        nums_bytes = [count * self._block_bytes for count in counts]
        ends = [num_cached + nbytes // self._block_bytes * self._block_size for nbytes in nums_bytes]
        at_once = [self._layers.at_once(nbytes) for nbytes in nums_bytes]
        gains_s = [
            self._gain_s(*each, num_tokens, busy_s)
            for each in zip(at_once, accumulate(part_s, initial=0.0), ends, strict=True)
        ]
        compute_s = [self.profile.seconds(num_tokens, end) for end in ends]
        choice = choose(part_s, compute_s, busy_s, gains_s)
        if self._reads != "auto":
            choice = replace(choice, num_parts=len(offers) if self._reads == "always" else 0)
        if gains_s[choice.num_parts] or (self._layers.mode == "always" and choice.num_parts):
            choice = replace(choice, layers_at_once=at_once[choice.num_parts])
        for store, _ in offers[choice.num_parts :]:
            self._of(store).skipped += 1
        return choice

    def _gain_s(self, at_once: int, read_s: float, end: int, num_tokens: int, busy_s: float) -> float:
        """Returns the gain of reading the prefix up to token `end` layer by layer; 0 if it is too small."""
        first_step_s = self.profile.seconds(min(end + self._chunk_tokens, num_tokens), end)
        gain_s = self._layers.gain_s(at_once, read_s, first_step_s, busy_s)
        return gain_s if gain_s >= LAYERED_IF_GAINS_S else 0.0

    def record_reads(self, reads: Sequence[PartRead], choice: LoadChoice, reader_host: str, now: float) -> None:
        """Records the reads of a chosen load, for the parts that were tried."""
        for read, predicted_s in zip(reads, choice.part_s, strict=False):
            figures = self._of(read.store)
            figures.reads += 1
            figures.failures += read.failed
            figures.num_bytes += 0 if read.failed else read.num_bytes
            figures.seconds += read.seconds
            figures.predicted_s += predicted_s
            self._update_speed(read, reader_host, now)

    def _update_speed(self, read: PartRead, reader_host: str, now: float) -> None:
        speed = self._speeds.of(read.store, reader_host, now)
        # A read of no bytes says nothing about speed. A failed read gives only a lower bound of its time.
        says_nothing = read.num_bytes == 0
        if read.failed:
            says_nothing = read.seconds <= speed.seconds(read.num_bytes)
        if not says_nothing:
            self._speeds.measured(read.store, speed.after(read.num_bytes, read.seconds), now)

    def read_stats(self) -> Mapping[str, StoreReadStats]:
        """Returns the statistics by store id, for metrics."""
        return dict(self._figures)

    def speeds(self) -> Mapping[str, Speed]:
        """Returns the measured speeds by store id, for metrics."""
        return self._speeds.all()

    def _of(self, store: Endpoint) -> StoreReadStats:
        return self._figures.setdefault(store.instance_id, StoreReadStats())
