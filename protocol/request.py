"""What a client wishes for (`SamplingParams`, `Request`) and what it gets (`Token`). Frozen, free of I/O.

Positions: a sequence's tokens are numbered from 0; the generated token with *index* i has position
num_prompt_tokens + i, whichever worker makes it. Sampling is a function of (seed, position) and the logits alone, so a
request that is continued elsewhere goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from protocol.ids import GatewayId, RequestId
from protocol.keys import BlockKey
from protocol.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Validated at the gateway; workers trust it."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None  # None = none; 0 = only the sampled token's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""  # that the output follows, as `protocol.grammar` reads it; empty = none
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output never has
    num_prompt_logprobs: int | None = None  # as num_logprobs, of the prompt's own tokens

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return self.penalizes or any(len(word) > 1 for word in self.bad_words)

    @property
    def penalizes(self) -> bool:
        """Whether tokens so far are more or less likely to come again."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A wish to continue `token_ids`, as workers see it."""

    request_id: RequestId
    gateway_id: GatewayId
    token_ids: tuple[int, ...]  # the client's prompt, then tokens it already received from an earlier attempt
    num_prompt_tokens: int  # of them, the client's prompt
    block_keys: tuple[BlockKey, ...]  # of the full blocks of token_ids
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    timeout_s: float = 600.0
    tenant: str = ""  # whose it is, where that is known
    traceparent: str = ""  # W3C Trace Context; empty = not traced

    @property
    def first_index(self) -> int:
        """Index of the next token to generate."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's own tokens are wanted: then all of it is computed, whatever of its
        KV is known. Not of a request that goes on: who had its first token has them."""
        return self.sampling.num_prompt_logprobs is not None and self.first_index == 0


class FinishReason(StrEnum):
    """Why a generation ended well, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities of the sampled token and of the most likely ones, best first."""

    sampled: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token."""

    request_id: RequestId
    index: int
    token_id: int
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None  # set on a request's last token


def finish_reason(sampling: SamplingParams, index: int, token_id: int) -> FinishReason | None:
    """Whether the generated token with this index ends the request. Prefill and decode workers must agree on it.

    Under a grammar every stop token does: before `min_tokens` it is only taken where nothing else could follow."""
    may_stop = index >= sampling.min_tokens or bool(sampling.grammar)
    if token_id in sampling.stop_token_ids and may_stop:
        return FinishReason.STOP
    if index + 1 >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """What the prefill phase of a request did, in seconds of the worker's own clock. Steps that it shared with others
    count by its share; the rest of them is queueing."""

    request_id: RequestId
    cached_tokens: int
    queue_s: float
    load_s: float
    compute_s: float
    prompt_logprobs: PromptLogprobs | None = None  # where the request wanted them


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """How a request came from its prefill worker into its first decode step, each part on the clock of who did it."""

    request_id: RequestId
    transfer_s: float  # first token to the last byte of KV; the prefill worker's
    queue_s: float  # commit to the first step's begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One process of the cluster as others address it."""

    instance_id: str
    epoch: int  # grows with every start of this instance
    rpc_address: str
    transfer_address: str
    host: str  # equal for processes that share memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """A run of the prompt's leading blocks and the store node that holds it."""

    store: Endpoint
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The conductor's answer: who prefills, who decodes, where the prefix comes from."""

    request_id: RequestId
    prefill: Endpoint
    decode: Endpoint
    prefix_sources: tuple[PrefixSource, ...] = field(default=())
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    rank: float = 0.0  # seconds; prompts wait at the prefill worker in the order of their arrival there + rank

    @property
    def is_undivided(self) -> bool:
        """Whether the decode worker prefills, too: there is no handoff."""
        return self.prefill == self.decode
