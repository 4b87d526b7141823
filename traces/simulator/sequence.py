"""One request while it decodes, as a batch sees it. Live state without behaviour."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.keys import BlockKey
from traces.simulator.segments import Run


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Figures are of the begin of the segment under way. Waiting without blocks: preempted, or not begun."""

    request_id: str
    rank: tuple[int, int]  # lower runs first and is preempted last
    tokens: int  # of context, the latest one included
    remaining: int  # tokens to generate
    missing: int = 1  # tokens without KV: 1 while decoding, more when computing the prompt (again)
    num_blocks: int = 0
    last_token_at: float | None = None  # None: it has none yet
    keys: Seq[BlockKey] = ()  # of the prompt's full blocks, where prefixes are cached
    cached_tokens: int = 0  # of the prompt, when it began
    prefill_s: float = 0.0  # time of its own in steps, until its first token
    begun_at: float | None = None  # None: no step had any of it
    runs: list[Run] = field(default_factory=list)  # closed ones
    run_from: int | None = None  # the open one's first segment; None = it gets no tokens now
    run_waited_s: float = 0.0  # of the open one
    sampled_in: int = -1  # latest segment that gives it tokens; before the first one: none
    gone: bool = False  # cancelled while a step runs


class Sampled(NamedTuple):
    """A sequence got its first token here."""

    sequence: Sequence
    at: float


class Finished(NamedTuple):
    """A sequence got its last token. `gaps_s`: between its tokens, the one to its first token here included."""

    sequence: Sequence
    at: float
    gaps_s: list[float]


Outcome = Sampled | Finished
