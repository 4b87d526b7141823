"""A request for allocators, whose tokens a test may count up."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.ids import RequestId


@dataclass(slots=True, eq=False)
class Asking:
    number: int
    num_prompt_tokens: int = 100
    max_tokens: int = 100
    generated: int = 1
    priority: int = 0
    tenant: str = ""
    blocks: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"r{self.number}")

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.number

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.generated
