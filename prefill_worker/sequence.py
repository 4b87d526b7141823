"""One request on its way through a prefill worker: its phase, its blocks, what is under way for it.

The phases form a table; a step that it does not list raises with the sequence's history and changes nothing. A
sequence that has ended for its client is CLOSING until nothing reads or writes its blocks any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from engine.batch import PromptScores, scores_for
from prefill_worker.events import Landing, PrefixProgress, SliceDone
from prefill_worker.load_or_compute import LoadChoice
from protocol.errors import MoonserveError
from protocol.ids import BlockId, LeaseId, RequestId
from protocol.keys import BlockKey
from protocol.profile import PrefillProfile
from protocol.request import Endpoint, Placement, Request, Token


class Phase(StrEnum):
    """Where a sequence stands."""

    QUEUED = "queued"  # holds nothing
    RESERVING = "reserving"  # holds blocks; the landing is asked for, a prefix may be loading
    LOADING = "loading"  # a prefix is loading, or writes of a step that began too early end
    READY = "ready"  # waits for a step
    RUNNING = "running"  # some tokens are computed or in the step under way
    SENDING = "sending"  # first token sent; writes are under way
    COMMITTING = "committing"  # all KV has landed; the decode worker verifies it
    CLOSING = "closing"  # ended for the client; operations under way still use its blocks
    CLOSED = "closed"  # holds nothing


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.QUEUED: frozenset({Phase.RESERVING, Phase.LOADING, Phase.READY, Phase.CLOSING}),
        Phase.RESERVING: frozenset({Phase.LOADING, Phase.READY, Phase.CLOSING}),
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
    """A bug of ours: the sequence cannot go there from where it is."""


# A place in the queue, lower runs first: priority, time of arrival + seconds it yields, number of the arrival.
Rank = tuple[int, float, int]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """The mutable execution of a `Request`."""

    request: Request
    placement: Placement
    rank: Rank
    lease_id: LeaseId
    submitted_at: float
    phase: Phase = Phase.QUEUED
    history: list[tuple[float, Phase]] = field(default_factory=list)
    scores: PromptScores | None = field(init=False)  # what the client wants of its prompt's tokens

    # From admission to CLOSED.
    block_table: list[BlockId] = field(default_factory=list)
    num_computed: int = 0  # leading tokens whose KV lies in the blocks
    num_cached: int = 0  # of them, those that were not computed for this request
    num_sent: int = 0  # leading tokens that the target has or that are on their way
    load_choice: LoadChoice | None = None  # where stores were said to hold some of its prefix
    checksums: dict[int, int] = field(default_factory=dict)  # by index of complete blocks
    landing: Landing | None = None  # from LandingGranted until released or handed off
    handed_off: bool = False
    first_token: Token | None = None  # from the end of RUNNING
    num_corrupt: int = 0  # handoffs that arrived corrupt
    compute_s: float = 0.0  # of steps until now; of shared ones its share
    waited_s: float = 0.0  # of the engine, for this one's prefix

    # Operations under way; its blocks stay held while there are any.
    is_reserving: bool = False
    is_loading: bool = False
    num_loading: int = 0  # tokens beyond num_computed that the load will bring
    arrival: Arrival | None = None  # of a load by layer, once the first ones are there
    early: EarlyStep | None = None  # while nothing that it computed counts
    was_early: bool = False  # and its step did not count: once is enough
    computing_to: list[int] = field(
        default_factory=list
    )  # ends of its slices in steps under way, in order; a worker alone has one step at a time
    is_spoilt: bool = False  # a step of it failed: what later ones compute of it is not to be used
    is_committing: bool = False
    num_sends: int = 0

    # Instants, each from the phase it names.
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
        """Tokens whose KV this worker provides."""
        return len(self.request.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens still to compute."""
        return self.num_tokens - self.num_computed

    @property
    def num_planned(self) -> int:
        """Leading tokens that are computed or in steps under way."""
        return self.computing_to[-1] if self.computing_to else self.num_computed

    @property
    def num_unplanned(self) -> int:
        """Tokens that no step has yet."""
        return self.num_tokens - self.num_planned

    @property
    def deadline_at(self) -> float:
        return self.submitted_at + self.request.timeout_s

    @property
    def needs_landing(self) -> bool:
        """False when the first token is known to be the last."""
        return self.request.first_index + 1 < self.request.sampling.max_tokens

    @property
    def is_busy(self) -> bool:
        """Whether an operation under way uses its blocks or may yet grant it a landing."""
        return (
            self.is_reserving or self.is_loading or bool(self.computing_to) or self.is_committing or self.num_sends > 0
        )

    def enter(self, phase: Phase, now: float) -> None:
        """Moves on. Raises IllegalTransition, which changes nothing, when the table does not list it."""
        if phase not in TRANSITIONS[self.phase]:
            past = " → ".join(f"{name}@{at:.3f}" for at, name in self.history)
            raise IllegalTransition(
                f"{self.request_id}: {self.phase} → {phase} at {now:.3f} is not a step of a "
                f"prefill sequence; so far: {past or 'nothing'}"
            )
        self.history.append((now, phase))
        self.phase = phase

    def usable_keys(self, block_size: int) -> tuple[BlockKey, ...]:
        """Keys of the blocks that need not be computed: the last token's logits always must be, and those of a whole
        prompt that is scored."""
        if self.scores is not None:
            return ()
        return self.request.block_keys[: (self.num_tokens - 1) // block_size]

    def source_runs(self, first: int, block_size: int) -> list[tuple[Endpoint, int, int]]:
        """(store, start, end) of what the sources hold of the usable blocks from `first` on, without a gap."""
        num_usable = len(self.usable_keys(block_size))
        runs: list[tuple[Endpoint, int, int]] = []
        for source in sorted(self.placement.prefix_sources, key=lambda s: s.first_block):
            end = min(source.first_block + source.num_blocks, num_usable)
            if source.first_block <= first < end:
                runs.append((source.store, first, end))
                first = end
        return runs

    def parent_key(self, index: int) -> BlockKey | None:
        """Key of the block before `index`; None for the first."""
        return self.request.block_keys[index - 1] if index else None

    def validate(self, block_size: int) -> None:
        """Raises AssertionError when the phase and what the sequence holds disagree."""
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
        assert self.is_reserving == (self.phase is Phase.RESERVING)
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
    """The step of one sequence that began before its prefix was there."""

    start: int  # its first token: so many must have loaded
    end: int
    num_sent: int  # leading tokens that the target had, or was being sent, before it
    outcome: SliceDone | MoonserveError | None = None  # None: it is under way
    waited_s: float = 0.0
    seconds: float = 0.0  # of the engine, waits included
    is_given_up: bool = False

    def ended(self, outcome: SliceDone | MoonserveError, *, waited_s: float = 0.0, seconds: float = 0.0) -> None:
        """The step is over; what it computed is put aside."""
        self.outcome, self.waited_s, self.seconds = outcome, waited_s, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How far a prefix that is read layer by layer has come, and when that was told."""

    progress: PrefixProgress
    at: float

    def left_s(self, now: float) -> float:
        """Until the last layer is there, at the pace so far."""
        told = self.progress
        per_layer_s = told.seconds / told.num_layers
        return max((told.of_layers - told.num_layers) * per_layer_s - (now - self.at), 0.0)

    def hides(self, profile: PrefillProfile, start: int, end: int, now: float) -> bool:
        """Whether computing [start, end) now is not expected to wait: the engine comes to the last layers that
        arrive together after all others."""
        told = self.progress
        before_last = 1.0 - told.layers_at_once / told.of_layers
        return self.left_s(now) <= profile.seconds(end, start) * before_last
