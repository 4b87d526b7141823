"""Which tenant has had less than its share: a virtual clock of service per tenant, and claims to what frees up. Pure.

Start-time fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996) with the service of "Fairness in Serving Large Language
Models" (Sheng et al., OSDI 2024): tokens of prompt that must be computed + `OUTPUT_WEIGHT` × tokens of answer. A
request's *tag* is where its tenant's account stands when it is placed; then its service ÷ the tenant's weight is added
to the account, the answer as expected and, once it has ended, as it was. No account stands before the least tag that
still waits for prefill, so that nobody saves up while idle and a new tenant begins beside those who have had least.

A prompt goes before those of other tenants that have later tags, and otherwise waits where the policy puts it. So one
tenant alone, or several who never wait, are served as if there were no accounts; among tenants who always wait, shares
of service ÷ weight differ by no more than a request of each; and nobody starves, since each tag is passed by
finitely many.

Under overload: who is rejected for load has a *claim* until it should be back, and while tenants with more service in
flight (÷ weight) come, they are rejected for the sake of the claim. That is weighted max-min of what is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conductor.columns import Floats, Ints
from conductor.fairness.waiting import WaitingPrompts
from protocol.errors import ConfigError
from protocol.ids import RequestId

OUTPUT_WEIGHT = 2  # tokens of prompt that one of an answer counts as (OSDI 2024, §5.1, after prices of services)
# A client comes back a little after the moment that it was told; who does not come loses the claim.
CLAIM_FACTOR = 2.0
MOST_CLAIM_S = 10.0
MOST_CLAIMS = 64  # the latest: each placement looks at all of them
# Between prompts that came to one instance at one instant, as in traces and bursts: so that another tenant's fits in.
TIE_S = 1e-5
_BURST_S = 1e-3  # of a hundred; what came longer before does not come at one instant
_FIRST_SWEEP = 1024  # accounts; names may be as many as requests


class Turn(NamedTuple):
    """What a request's tenant deserves as it is placed. Tags and `served` are tokens ÷ weight."""

    tenant: str
    weight: float
    tag: float
    served: float  # no account stands before it
    in_flight: int  # of the tenant's requests that have not ended, tokens

    @property
    def ahead_tokens(self) -> float:
        """By which the tenant has had more than who had least, of those who wait."""
        return (self.tag - self.served) * self.weight


@dataclass(slots=True, eq=False)
class _Account:
    number: int  # in the columns of who waits
    weight: float
    tag: float  # of its latest request; they never go back
    finish: float  # of the service that it was charged
    in_flight: int = 0  # service of requests that have not ended
    num_in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Charge:
    """A request that has not ended."""

    tenant: str
    prompt_tokens: int  # to compute
    output_tokens: int  # expected

    @property
    def service(self) -> int:
        return self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens


class Fairness:
    """All tenants that wait, have requests in flight or are ahead of others. `weights`: 1 where not given."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._waiting = WaitingPrompts()
        self._accounts: dict[str, _Account] = {}
        self._charges: dict[RequestId, _Charge] = {}
        self._claims: dict[str, float] = {}  # until when; oldest first
        self._served = 0.0
        self._last: dict[tuple[int, int], float] = {}  # place by link and priority
        self._num_accounts = 0
        self._sweep_at = _FIRST_SWEEP

    # ---- questions: nothing changes

    def turn(self, tenant: str) -> Turn:
        """Of a request that is placed now."""
        account, weight = self._accounts.get(tenant), self._weights.get(tenant, 1.0)
        served = self._served_now()
        if account is None:
            return Turn(tenant, weight, served, served, 0)
        tag = max(served, account.finish, account.tag)
        return Turn(tenant, weight, tag, served, account.in_flight)

    def places_to_take(self, turn: Turn, priority: int, links: Ints) -> Floats | None:
        """Which place a prompt takes by its turn at each instance; None, or infinite at one = it goes before nobody."""
        account = self._accounts.get(turn.tenant)
        others = len(self._accounts) - (account is not None)
        if not others or not len(self._waiting):
            return None
        number = None if account is None else account.number
        return self._waiting.places_to_take(turn.tag, number, priority, links)

    def tie_s(self, place: float, priority: int, link: int) -> float:
        """Seconds by which a prompt's place is behind this one, which others have that came at the same instant."""
        ahead_s = self._last.get((link, priority), -math.inf) - place
        return ahead_s + TIE_S if 0.0 <= ahead_s < _BURST_S else 0.0

    def has_below(self, priority: int) -> bool:
        """Whether prompts of a larger number wait."""
        return self._waiting.has_below(priority)

    def waits(self, request_id: RequestId) -> bool:
        """Whether it is placed and not known to be prefilled."""
        return request_id in self._waiting

    def claimed_until(self, turn: Turn, now: float) -> float | None:
        """Until when somebody has a claim who has less in flight than this tenant."""
        found = [
            until
            for tenant, until in self._claims.items()
            if until > now and tenant != turn.tenant and self._has_less(tenant, turn)
        ]
        return max(found, default=None)

    def _has_less(self, tenant: str, turn: Turn) -> bool:
        account, weight = self._accounts.get(tenant), self._weights.get(tenant, 1.0)
        in_flight = 0 if account is None else account.in_flight
        return in_flight / weight < turn.in_flight / turn.weight

    def _served_now(self) -> float:
        return max(self._served, self._waiting.least_tag()) if len(self._waiting) else self._served

    # ---- what happens

    def begin(
        self,
        request_id: RequestId,
        turn: Turn,
        *,
        prompt_tokens: int,
        output_tokens: float,
        place: float,
        link: int,
        priority: int,
    ) -> None:
        """It is placed; no request of this id is in flight. `prompt_tokens`: to compute; `output_tokens`: expected;
        `place`: in the queue of the instance with this link."""
        self._served = self._served_now()
        charge = _Charge(turn.tenant, prompt_tokens, round(output_tokens))
        account = self._account(turn.tenant)
        account.tag = turn.tag
        account.finish = turn.tag + charge.service / account.weight
        account.in_flight += charge.service
        account.num_in_flight += 1
        self._charges[request_id] = charge
        self._claims.pop(turn.tenant, None)
        last = self._last.get((link, priority), -math.inf)
        self._last[link, priority] = max(last, place)
        self._waiting.add(
            request_id,
            tag=turn.tag,
            place=place,
            link=link,
            tenant=account.number,
            priority=priority,
        )

    def prefilled(self, request_id: RequestId) -> None:
        """It waits no more. Unknown ones are ignored."""
        self._served = self._served_now()
        if self._waiting.remove(request_id) and not len(self._waiting):
            self._settle()

    def lost(self, link: int) -> None:
        """The instance is gone; its requests end by themselves."""
        self._last = {key: place for key, place in self._last.items() if key[0] != link}
        for request_id in self._waiting.at(link):
            self.prefilled(request_id)

    def ended(self, request_id: RequestId, output_tokens: int | None = None) -> None:
        """None: as many as expected. What was never computed costs nothing. Unknown ones are ignored."""
        charge = self._charges.pop(request_id, None)
        if charge is None:
            return
        account = self._accounts[charge.tenant]
        account.in_flight -= charge.service
        account.num_in_flight -= 1
        if request_id in self._waiting:
            account.finish -= charge.service / account.weight
            self.prefilled(request_id)
        elif output_tokens is not None:
            more = output_tokens - charge.output_tokens
            account.finish = max(account.finish, self._served) + OUTPUT_WEIGHT * more / account.weight
        if not len(self._waiting):
            self._settle()

    def claim(self, tenant: str, now: float, retry_after_s: float) -> None:
        """The tenant was rejected for load and told to come back."""
        self._claims = {t: until for t, until in self._claims.items() if until > now}
        self._claims.pop(tenant, None)
        self._claims[tenant] = now + min(CLAIM_FACTOR * retry_after_s, MOST_CLAIM_S)
        if len(self._claims) > MOST_CLAIMS:
            del self._claims[next(iter(self._claims))]

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            self._num_accounts += 1
            weight = self._weights.get(tenant, 1.0)
            account = _Account(self._num_accounts, weight, self._served, self._served)
            self._accounts[tenant] = account
        return account

    def _sweep(self) -> None:
        """Forgets those who would begin anew anyway."""
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_in_flight or max(account.finish, account.tag) > self._served
        }
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._accounts))

    def _settle(self) -> None:
        """Nobody waits, so nobody is ahead of anybody: all begin anew, beside who was furthest."""
        furthest = max((account.finish for account in self._accounts.values()), default=0.0)
        self._served = max(self._served, furthest)
        self._accounts = {t: a for t, a in self._accounts.items() if a.num_in_flight}

    def validate(self) -> None:
        """Raises AssertionError unless accounts and charges agree, and who waits is in flight and not passed."""
        self._waiting.validate()
        for tenant, account in self._accounts.items():
            own = [c.service for c in self._charges.values() if c.tenant == tenant]
            assert (account.in_flight, account.num_in_flight) == (sum(own), len(own))
        assert {c.tenant for c in self._charges.values()} <= self._accounts.keys()
        numbers = [account.number for account in self._accounts.values()]
        assert len(set(numbers)) == len(numbers)
        assert set(self._waiting.tenants()) <= set(numbers)
        assert len(self._claims) <= MOST_CLAIMS
        if len(self._waiting):
            assert self._served <= self._waiting.least_tag(), "an account could begin behind a tag"


def parse_weights(entries: Sequence[str]) -> dict[str, float]:
    """`tenant=weight` each. Raises ConfigError."""
    weights: dict[str, float] = {}
    for entry in entries:
        tenant, _, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not tenant or tenant in weights or not 0.0 < weight < math.inf:
            raise ConfigError(f"--tenant-weights {entry!r} must be tenant=number above 0, each tenant once")
        weights[tenant] = weight
    return weights
