"""Requests, tokens, reports, placements and the identifiers in them; frozen types without I/O.

The tokens of a sequence are numbered from 0. The generated token with *index* i has position num_prompt_tokens + i,
whichever worker samples it. Sampling depends on (seed, position) and the logits alone, so a request that continues on
another worker yields the same tokens.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey

InstanceId = NewType("InstanceId", str)
"""Name of a long-lived process of the cluster, stable across restarts: `prefill-0`, `store-1`."""

RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
GatewayId = NewType("GatewayId", str)

BlockId = int
"""Index of a block in one pool."""


class Role(StrEnum):
    """Role of an instance in the cluster."""

    PREFILL = "prefill"
    DECODE = "decode"
    STORE = "store"


def new_id(prefix: str) -> str:
    """Returns a new random id, unique in the cluster, such as `req-9f86d081884c7d65`."""
    return f"{prefix}-{secrets.token_hex(8)}"


LOGPROB_DTYPE = np.dtype("<f4")
RANK_DTYPE = np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of n consecutive tokens, each given all before it, in arrays, since prompts are long.

    A whole prompt has them for all tokens but the first."""

    logprobs: npt.NDArray[np.float32]  # [n], natural logarithms
    ranks: npt.NDArray[np.uint32]  # [n], 1 = no token was likelier
    top_ids: npt.NDArray[np.uint32]  # [n, k], the likeliest tokens at each position, best first
    top_logprobs: npt.NDArray[np.float32]  # [n, k], log-probabilities of top_ids

    def __len__(self) -> int:
        return len(self.logprobs)

    @classmethod
    def joined(cls, runs: "list[PromptLogprobs]", num_top: int) -> "PromptLogprobs":
        """Concatenates consecutive runs with `num_top` likeliest tokens each. No runs give an empty one."""
        if not runs:
            return cls(
                logprobs=np.empty(0, LOGPROB_DTYPE),
                ranks=np.empty(0, RANK_DTYPE),
                top_ids=np.empty((0, num_top), RANK_DTYPE),
                top_logprobs=np.empty((0, num_top), LOGPROB_DTYPE),
            )
        return cls(
            logprobs=np.concatenate([run.logprobs for run in runs]),
            ranks=np.concatenate([run.ranks for run in runs]),
            top_ids=np.concatenate([run.top_ids for run in runs]),
            top_logprobs=np.concatenate([run.top_logprobs for run in runs]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that choose tokens and end the generation. The gateway validates them; workers trust them."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    num_logprobs: int | None = None  # None = no log-probabilities; 0 = only the sampled token's
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""  # that the output must follow (`protocol.grammar`); empty = none
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    num_prompt_logprobs: int | None = None  # like num_logprobs, for the prompt's own tokens

    @property
    def needs_history(self) -> bool:
        """True if the choice of a token depends on the tokens so far."""
        return self.penalizes or any(len(word) > 1 for word in self.bad_words)

    @property
    def penalizes(self) -> bool:
        """True if a penalty changes the probability of tokens that occurred before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHints:
    """What is known about the further use of a request's KV. The defaults say nothing. Times are in seconds."""

    store: bool = True  # False = its new blocks are neither stored nor kept in device caches
    return_within_s: float | None = None  # the chain is likely to be used again so soon after it was stored
    ttl_s: float | None = None  # time without a use after which a block leaves first
    low_priority: bool = False  # leaves before all blocks of normal priority

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a time that is not a number above 0."""
        for seconds in (self.return_within_s, self.ttl_s):
            if seconds is not None and not 0.0 < seconds < math.inf:
                raise InvalidRequest(f"a cache hint of {seconds} s; it must be above 0", param="cache_hints")

    def without_return(self) -> "CacheHints":
        """Returns the hints of the blocks before the last one of the chain."""
        return replace(self, return_within_s=None)


NO_HINTS = CacheHints()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request to continue `token_ids`, in the form that workers receive."""

    request_id: RequestId
    gateway_id: GatewayId
    token_ids: tuple[int, ...]  # the client's prompt, then tokens that earlier attempts already delivered
    num_prompt_tokens: int  # length of the client's prompt
    block_keys: tuple[BlockKey, ...]  # of the full blocks of token_ids
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    timeout_s: float = 600.0
    tenant: str = ""  # empty = unknown
    traceparent: str = ""  # W3C Trace Context; empty = not traced
    cache_hints: CacheHints = NO_HINTS

    @property
    def first_index(self) -> int:
        """Index of the next token to generate."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the prompt are wanted: the whole prompt is computed, even if its KV is cached.

        False for a request that continues after a loss: the client has them since its first token."""
        return self.sampling.num_prompt_logprobs is not None and self.first_index == 0


class RequestPhase(StrEnum):
    """Stage of a placed request that its gateway reports to the conductor."""

    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Reason for the regular end of a generation, in the terms of OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities of the sampled token and of the most likely tokens, best first."""

    sampled: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token."""

    request_id: RequestId
    index: int
    token_id: int
    logprobs: Logprobs | None = None
    # Only on a request's last token.
    finish_reason: FinishReason | None = None
    num_draft_tokens: int = field(default=0, compare=False)  # of the request, guessed by its worker and computed
    num_accepted_tokens: int = field(default=0, compare=False)  # of these, tokens that were right


def finish_reason(sampling: SamplingParams, index: int, token_id: int) -> FinishReason | None:
    """Returns the finish reason if the token with this index ends the request. Prefill and decode workers must agree.

    Under a grammar every stop token ends it: before `min_tokens` one is only sampled if nothing else can follow."""
    may_stop = index >= sampling.min_tokens or bool(sampling.grammar)
    if token_id in sampling.stop_token_ids and may_stop:
        return FinishReason.STOP
    return FinishReason.LENGTH if index + 1 >= sampling.max_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """Times and cache hits of a request's prefill, in seconds of the worker's own clock.

    A step that several requests share counts by each one's share; the rest of the step counts as queueing."""

    request_id: RequestId
    cached_tokens: int
    queue_s: float
    load_s: float
    compute_s: float
    prompt_logprobs: PromptLogprobs | None = None  # if the request wants them


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """Times of a request's handoff to its first decode step, each on the clock of the worker that measures it."""

    request_id: RequestId
    transfer_s: float  # first token to the last byte of KV, on the prefill worker's clock
    queue_s: float  # commit to the start of the first step, on the decode worker's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Addresses and epoch of one process of the cluster."""

    instance_id: str
    epoch: int  # grows with each start of this instance
    rpc_address: str
    transfer_address: str
    host: str  # equal for processes that share memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """Run of the prompt's leading blocks and the store node that holds it."""

    store: Endpoint
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The conductor's decision for a request: prefill worker, decode worker and sources of the prefix."""

    request_id: RequestId
    prefill: Endpoint
    decode: Endpoint
    prefix_sources: tuple[PrefixSource, ...] = field(default=())
    predicted_ttft_s: float = 0.0
    predicted_tbt_s: float = 0.0
    rank: float = 0.0  # seconds; the prefill worker orders its queue by arrival time + rank

    @property
    def is_local_prefill(self) -> bool:
        """True if the decode worker also runs the prefill, without a handoff."""
        return self.prefill == self.decode
