"""State of one request in a prefill worker: its phase, its blocks and its operations in flight.

Phase transitions are listed in a table. Any other transition raises with the sequence's history and changes nothing. A
sequence that has ended for its client is CLOSING until nothing reads or writes its blocks any more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from moonserve.engine.model.batch import PromptScores, scores_for
from moonserve.prefill_worker.decisions.events import Landing, PrefixProgress, SliceDone
from moonserve.prefill_worker.decisions.load_or_compute import LoadChoice
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import BlockId, Endpoint, LeaseId, Placement, Request, RequestId, Token
from moonserve.protocol.step_time import PrefillProfile


class Phase(StrEnum):
    """Phases of a sequence's life."""

    QUEUED = "queued"  # holds nothing
    RESERVING = "reserving"  # holds blocks; the landing is requested, a prefix may be loading
    LOADING = "loading"  # a prefix is loading, or the writes of a dropped early step have yet to end
    READY = "ready"  # waits for a step
    RUNNING = "running"  # some tokens are computed or in a step in flight; the landing may still be requested
    SENDING = "sending"  # first token sent; writes are in flight
    COMMITTING = "committing"  # all KV has landed; the decode worker verifies it
    CLOSING = "closing"  # ended for the client; operations in flight still use its blocks
    CLOSED = "closed"  # holds nothing


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.QUEUED: frozenset({Phase.RESERVING, Phase.LOADING, Phase.READY, Phase.CLOSING}),
        Phase.RESERVING: frozenset({Phase.LOADING, Phase.READY, Phase.RUNNING, Phase.CLOSING}),
        Phase.LOADING: frozenset({Phase.READY, Phase.RUNNING, Phase.CLOSING}),
        Phase.READY: frozenset({Phase.RUNNING, Phase.CLOSING}),
        Phase.RUNNING: frozenset({Phase.SENDING, Phase.LOADING, Phase.CLOSING}),
        Phase.SENDING: frozenset({Phase.COMMITTING, Phase.CLOSING}),
        Phase.COMMITTING: frozenset({Phase.READY, Phase.CLOSING}),
        Phase.CLOSING: frozenset({Phase.CLOSED}),
        Phase.CLOSED: frozenset(),
    }
)

PREPARED = frozenset({Phase.RESERVING, Phase.LOADING, Phase.READY})
RUNNABLE = frozenset({Phase.READY, Phase.RUNNING})
ENDED = frozenset({Phase.CLOSING, Phase.CLOSED})


class IllegalTransition(Exception):
    """Raised for a phase transition that the table does not list. It is always a bug."""


# Place in the queue; the lowest runs first: priority, time of arrival + seconds to yield, number of the arrival.
Rank = tuple[int, float, int]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """The mutable execution state of one request."""

    request: Request
    placement: Placement
    rank: Rank
    lease_id: LeaseId
    submitted_at: float
    phase: Phase = Phase.QUEUED
    history: list[tuple[float, Phase]] = field(default_factory=list)
    scores: PromptScores | None = field(init=False)  # log-probabilities of the prompt's tokens, if requested

    # Valid from admission to CLOSED.
    block_table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0  # leading tokens whose KV is in the blocks
    num_cached: int = 0  # leading tokens whose KV was not computed for this request
    num_sent: int = 0  # leading tokens that the target has or that are in flight to it
    load_choice: LoadChoice | None = None  # set if stores were reported to hold some of the prefix
    checksums: dict[int, int] = field(default_factory=dict)  # of complete blocks, by index
    landing: Landing | None = None  # from LandingGranted until released or handed off
    handed_off: bool = False
    first_token: Token | None = None  # from the end of RUNNING
    num_corrupt: int = 0  # number of handoffs that arrived corrupt
    compute_s: float = 0.0  # time of its steps so far; its share of shared steps
    waited_s: float = 0.0  # time that the engine waited for its prefix

    # Operations in flight; blocks stay held while there are any.
    is_reserving: bool = False
    is_loading: bool = False
    num_loading: int = 0  # tokens beyond num_computed that the load will bring
    load_progress: "LoadProgress | None" = None  # progress of a load by layer, once the first layers have arrived
    early: "EarlyStep | None" = None  # the early step whose result does not count yet
    was_early: bool = False  # an early step was dropped; it is not tried again
    slice_ends_in_flight: list[int] = field(
        default_factory=list
    )  # ends of its slices in steps in flight, in order; at most one without a pipeline
    held_result: SliceDone | None = None  # of its last step, until the landing is granted
    is_invalid: bool = False  # one of its steps failed: results of its later steps are not used
    is_committing: bool = False
    num_sends: int = 0

    # Times, each valid from the phase that it names.
    admitted_at: float = 0.0
    ready_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0  # with first_token

    def __post_init__(self) -> None:
        self.scores = scores_for(self.request)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV this worker provides."""
        return len(self.request.token_ids)

    @property
    def num_left(self) -> int:
        """Number of tokens still to compute."""
        return self.num_tokens - self.num_computed

    @property
    def num_planned(self) -> int:
        """Number of leading tokens that are computed or in steps in flight."""
        return self.slice_ends_in_flight[-1] if self.slice_ends_in_flight else self.num_computed

    @property
    def num_unplanned(self) -> int:
        """Number of tokens that are neither computed nor in a step."""
        return self.num_tokens - self.num_planned

    @property
    def deadline_at(self) -> float:
        return self.submitted_at + self.request.timeout_s

    @property
    def needs_landing(self) -> bool:
        """True unless the first token is known to be the last."""
        return self.request.first_index + 1 < self.request.sampling.max_tokens

    @property
    def is_busy(self) -> bool:
        """True if an operation in flight uses the sequence's blocks or may yet grant it a landing."""
        return (
            self.is_reserving
            or self.is_loading
            or bool(self.slice_ends_in_flight)
            or self.is_committing
            or self.num_sends > 0
        )

    def enter(self, phase: Phase, now: float) -> None:
        """Enters a phase. Raises IllegalTransition, and changes nothing, if the table does not list the transition."""
        if phase not in TRANSITIONS[self.phase]:
            past = " → ".join(f"{name}@{at:.3f}" for at, name in self.history)
            raise IllegalTransition(
                f"{self.request_id}: {self.phase} → {phase} at {now:.3f} is not a step of a "
                f"prefill sequence; so far: {past or 'nothing'}"
            )
        self.history.append((now, phase))
        self.phase = phase

    def usable_keys(self, block_size: int) -> tuple[BlockKey, ...]:
        """Returns the keys of the blocks that need not be computed. The last token is always computed for its logits; a
        prompt that is scored is computed whole."""
        return () if self.scores is not None else self.request.block_keys[: (self.num_tokens - 1) // block_size]

    def source_runs(self, first: int, block_size: int) -> list[tuple[Endpoint, int, int]]:
        """Returns (store, start, end) of the usable blocks that the sources hold, contiguous from `first` on."""
        num_usable = len(self.usable_keys(block_size))
        runs: list[tuple[Endpoint, int, int]] = []
        for source in sorted(self.placement.prefix_sources, key=lambda s: s.first_block):
            end = min(source.first_block + source.num_blocks, num_usable)
            if source.first_block <= first < end:
                runs.append((source.store, first, end))
                first = end
        return runs

    def parent_key(self, index: int) -> BlockKey | None:
        """Returns the key of the block before `index`, or None for the first block."""
        return self.request.block_keys[index - 1] if index else None

    def validate(self, block_size: int) -> None:
        """Raises AssertionError if the phase disagrees with the blocks or operations of the sequence."""
        assert self.phase is not Phase.CLOSED, f"{self.request_id} is closed and still listed"
        if self.phase is Phase.QUEUED:
            assert not self.block_table, f"{self.request_id} holds blocks too early"
            assert not self.is_busy, f"{self.request_id} waits for something too early"
            return
        if self.phase is Phase.CLOSING:
            assert self.is_busy, f"{self.request_id} is closing and waits for nothing"
            return
        assert len(self.block_table) == -(-self.num_tokens // block_size)
        assert self.num_computed <= self.num_tokens
        assert self.is_reserving or self.phase is not Phase.RESERVING, f"{self.request_id} requests no landing"
        assert not self.is_reserving or self.phase in (Phase.RESERVING, Phase.RUNNING)
        assert self.held_result is None or (self.is_reserving and self.num_left == 0)
        loads_early = self.early is not None and self.phase is Phase.RUNNING
        assert (self.early is None) or loads_early, f"{self.request_id} began early and went on"
        assert self.is_loading <= (self.phase in (Phase.RESERVING, Phase.LOADING) or loads_early)
        if self.phase is Phase.LOADING:
            assert self.is_loading or self.num_sends, f"{self.request_id} loads nothing"
        assert self.is_loading == (self.num_loading > 0)
        assert self.is_committing == (self.phase is Phase.COMMITTING)
        if self.phase in (Phase.SENDING, Phase.COMMITTING):
            assert self.num_left == 0, f"{self.request_id} left RUNNING too early"
            assert self.first_token is not None, f"{self.request_id} has no first token"
            assert self.num_sent == self.num_tokens, f"{self.request_id} is not sent in full"


@dataclass(slots=True, eq=False, kw_only=True)
class EarlyStep:
    """A step of one sequence that began before the sequence's prefix had loaded."""

    start: int  # its first token; the tokens before it must load
    end: int
    num_sent: int  # value of `Sequence.num_sent` before the step
    outcome: SliceDone | MoonserveError | None = None  # None while the step is in flight
    waited_s: float = 0.0
    seconds: float = 0.0  # duration, including waits
    is_given_up: bool = False

    def record_result(
        self, outcome: SliceDone | MoonserveError, *, waited_s: float = 0.0, seconds: float = 0.0
    ) -> None:
        """Records the step's result, which is held back until the prefix has loaded."""
        self.outcome, self.waited_s, self.seconds = outcome, waited_s, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Progress of a prefix that is read layer by layer, and the time of its report."""

    progress: PrefixProgress
    at: float

    def remaining_s(self, now: float) -> float:
        """Returns the seconds until the last layer arrives, at the pace so far."""
        progress = self.progress
        per_layer_s = progress.seconds / progress.num_layers
        return max((progress.of_layers - progress.num_layers) * per_layer_s - (now - self.at), 0.0)

    def fits_behind_loading(self, profile: PrefillProfile, start: int, end: int, now: float) -> bool:
        """Returns True if computing [start, end) now is not expected to wait for layers. The engine reaches the last
        turn's layers after it has computed all others."""
        progress = self.progress
        before_last = 1.0 - progress.layers_at_once / progress.of_layers
        return self.remaining_s(now) <= profile.seconds(end, start) * before_last
