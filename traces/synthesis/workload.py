"""What a described workload consists of: frozen data, checked once. Shares are of newly begun threads, from 0 to 1.

A *thread* is what one user does: a session of turns that each extend the last prompt, questions about one document, or
a single request. Any of them may begin with one of a few system prompts, whose popularity follows Zipf's law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocol.errors import ConfigError
from traces.synthesis.arrivals import ArrivalSpec
from traces.synthesis.draws import Constant, Draws, LogNormal


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """The defaults are a chat with a few system prompts."""

    arrivals: ArrivalSpec = ArrivalSpec(rate=1.0)  # noqa: RUF009  # frozen, as all calls below
    num_requests: int = 10_000
    input_tokens: Draws = LogNormal(2_000, 1.0)  # noqa: RUF009
    output_tokens: Draws = LogNormal(300, 0.8)  # noqa: RUF009
    max_input_tokens: int = 128_000
    # System prompts: whole blocks of them are shared by all threads that begin with the same one.
    system_share: float = 1.0
    system_prompts: int = 10
    system_zipf: float = 1.0
    system_tokens: Draws = Constant(1_024)  # noqa: RUF009
    # Sessions: each turn is the last prompt, its answer and new tokens.
    session_share: float = 0.5
    turns: float = 3.0  # mean, at least 1; geometric
    turn_tokens: Draws = LogNormal(300, 1.0)  # noqa: RUF009
    think_s: Draws = LogNormal(90, 1.0)  # noqa: RUF009  # from arrival to arrival
    # Documents: each question is the document and new tokens.
    document_share: float = 0.0
    questions: float = 4.0  # mean, at least 1; geometric
    document_tokens: Draws = LogNormal(15_000, 0.8)  # noqa: RUF009
    question_tokens: Draws = LogNormal(200, 0.8)  # noqa: RUF009

    def check(self) -> None:
        """Raises ConfigError that says what to change."""
        self.arrivals.check()
        for name in ("system_share", "session_share", "document_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} is a share from 0 to 1")
        if self.session_share + self.document_share > 1:
            raise ConfigError("--session-share and --document-share add up to more than 1")
        for name in ("num_requests", "max_input_tokens", "system_prompts", "turns", "questions"):
            if not 1 <= getattr(self, name) < math.inf:
                flag = "requests" if name == "num_requests" else name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least 1")
        if not 0 <= self.system_zipf < 100:
            raise ConfigError("--system-zipf must be 0 (all alike) or more")
