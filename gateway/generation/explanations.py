"""Why a request went where it went: from an id that a client knows to the conductor's records of all its placements.

Clients name requests as they like, and use a name again; the cluster's id differs then. The conductor is told the name
with the first placement, so that every gateway can explain what another one served. Does not know HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gateway.generation.state import MAX_ATTEMPTS, attempt_id
from protocol.ids import RequestId
from protocol.pb import conductor_pb2

_BODY_ID = re.compile("^(?:(?:chat)?cmpl-|resp_)")

Ask = Callable[[str], Awaitable[conductor_pb2.ExplainReply]]


def choice_id(request_id: str, index: int) -> RequestId:
    """The id under which the cluster knows one choice of a request."""
    return RequestId(f"{request_id}.{index}" if index else request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`decisions`: conductor.decision.Decision as JSON objects, one per choice and attempt, in that order; empty when
    nothing is remembered about the request."""

    request_id: str
    decisions: tuple[dict[str, Any], ...]
    num_decisions: int  # of how many requests the conductor remembers decisions
    max_decisions: int  # at most


async def explain(known_id: str, ask: Ask) -> Explanation:
    """`known_id`: what the client knows, from a header or a body. Raises what `ask` raises. Asks for one id
    after the other: most requests have one choice and one attempt."""
    for name in dict.fromkeys((known_id, _BODY_ID.sub("", known_id))):
        named = await ask(name)
        request_id = json.loads(named.decision_json)["request_id"] if named.found else name
        decisions, last = await _decisions(request_id, ask)
        if decisions:
            break
    return Explanation(
        request_id=request_id,
        decisions=tuple(decisions),
        num_decisions=last.num_decisions,
        max_decisions=last.max_decisions,
    )


async def _decisions(
    request_id: str, ask: Ask
) -> tuple[list[dict[str, Any]], conductor_pb2.ExplainReply]:
    """Decisions about all attempts of all choices, up to the first unknown choice, and the last reply. A choice's first
    attempts may have been forgotten, or made by an earlier leader."""
    decisions: list[dict[str, Any]] = []
    # Of the attempt that is asked for; whether its choice has others.
    index, attempt, is_known = 0, 1, False
    while True:
        reply = await ask(attempt_id(choice_id(request_id, index), attempt))
        if reply.found:
            decisions.append(json.loads(reply.decision_json))
            attempt, is_known = attempt + 1, True
        elif attempt < MAX_ATTEMPTS:
            attempt += 1
        elif is_known:
            index, attempt, is_known = index + 1, 1, False
        else:
            return decisions, reply
