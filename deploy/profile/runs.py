"""What a probe of a running cluster notes: a record for each prompt, stretch of steps, answer. Plain data, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """One prompt, seconds."""

    machine: str  # that computed it
    num_tokens: int
    num_cached: int
    num_others: int  # machines that computed beside it
    decodes_beside: bool  # one of them was a decode machine
    ttft_s: float  # at the client
    placed_s: float  # of it, until the conductor has placed it
    queue_s: float  # at the prefill worker, like the next two
    load_s: float
    compute_s: float
    second_gap_s: float | None  # between the first and the second token
    step_s: float | None  # between later ones


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """Steps of a batch while nobody joined or left."""

    num_seqs: int
    prompt_tokens: int  # of each
    context_tokens: int  # of all together, generated ones too
    num_others: int
    seconds: float  # per step
    gaps_s: tuple[float, ...] = ()  # between tokens as their client sees them, of all sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt of a burst and its answer; instants of the client's clock."""

    machine: str  # that computed it
    num_tokens: int
    sent_at: float
    placed_s: float  # after that
    computes_from: float
    computes_until: float
    token_at: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Everything that was measured; `beside_*` belong together and are compared with each other only."""

    prompts: Sequence[PromptRun]
    steps: Sequence[StepRun]
    beside_prompts: Sequence[PromptRun]
    beside_steps: Sequence[StepRun]
    # Of prompts sent at one moment: what each takes of the time until the next one is placed, and those that were
    # computed right after another.
    bursts_s: Sequence[float] = ()
    in_a_row: Sequence[PromptRun] = ()
    answered: Sequence[
        Sequence[Answered]
    ] = ()  # bursts whose answers are as long as they usually are
