"""Fair shares of tenants: a virtual clock of service per tenant, and claims of rejected tenants to free capacity. Pure.

The algorithm is start-time fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996). Service is counted as in "Fairness in
Serving Large Language Models" (Sheng et al., OSDI 2024): prompt tokens to compute + `OUTPUT_WEIGHT` × answer tokens. A
request's *tag* is its tenant's account at placement. Then its service ÷ the tenant's weight is added to the account;
the expected answer length is corrected to the real one when the request ends. No account is below the smallest tag
that still waits for prefill, so idle tenants save nothing up and a new tenant starts level with the least served one.

A prompt runs before prompts of other tenants with later tags, and otherwise waits where the policy puts it. So a single
tenant, or several that never queue, are served as if there were no accounts. Among tenants that always have prompts
waiting, service ÷ weight differs by at most one request of each. No prompt starves, since only finitely many
requests can overtake a tag.

Under overload, a tenant that is rejected for load has a *claim* until it should be back. Meanwhile requests of tenants
with more service in flight (÷ weight) are rejected in its favour. This makes admission weighted max-min fair.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moonserve.conductor.prediction.instance_table import Floats, Ints
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import RequestId

_FIRST_ROWS = 64
# Distance to the prompt in front: a thousand prompts fit between two that were placed a millisecond apart. Places are
# monotonic seconds, which do not resolve less.
_BEHIND_S = 1e-6
_BEFORE_ALL_S = 1e-3


class WaitingPrompts:
    """Columns of the prompts that are placed and not prefilled yet: tenants, tags and places in the queues.

    A place is the one in `PrefillQueue`: placement time + rank in seconds, lowest first. An instance is identified by
    its link (`conductor.prediction.transfer_time`). A prompt is here exactly as long as it is in its instance's queue.
    """

    def __init__(self) -> None:
        self._ids: list[RequestId] = []
        self._row: dict[RequestId, int] = {}
        # None: the prompt that had it is gone, and the minimum has to be computed again.
        self._least_tag: float | None = math.inf
        self._tags = np.zeros(_FIRST_ROWS)
        self._places = np.zeros(_FIRST_ROWS)
        self._links = np.zeros(_FIRST_ROWS, np.int64)
        self._tenants = np.zeros(_FIRST_ROWS, np.int64)
        self._priorities = np.zeros(_FIRST_ROWS, np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._row

    def add(
        self,
        request_id: RequestId,
        *,
        tag: float,
        place: float,
        link: int,
        tenant: int,
        priority: int,
    ) -> None:
        """Adds a prompt that is not here yet."""
        row = len(self._ids)
        if row == len(self._tags):
            self._grow()
        self._ids.append(request_id)
        self._row[request_id] = row
        if self._least_tag is not None:
            self._least_tag = min(self._least_tag, tag)
        self._tags[row], self._places[row], self._links[row] = tag, place, link
        self._tenants[row], self._priorities[row] = tenant, priority

    def remove(self, request_id: RequestId) -> bool:
        """Removes a prompt; the last row moves into its row. Returns False if it is not here."""
        row = self._row.pop(request_id, None)
        if row is None:
            return False
        last_id, last = self._ids.pop(), len(self._ids)
        if self._tags[row] == self._least_tag:
            self._least_tag = None
        if row != last:
            self._ids[row], self._row[last_id] = last_id, row
            for column in self._columns():
                column[row] = column[last]
        return True

    def at(self, link: int) -> list[RequestId]:
        """Returns the prompts that wait at one instance."""
        return [self._ids[row] for row in np.flatnonzero(self._links[: len(self)] == link).tolist()]

    def least_tag(self) -> float:
        """Returns the smallest tag; infinite if no prompt waits."""
        if self._least_tag is None:
            self._least_tag = float(self._tags[: len(self)].min()) if self._ids else math.inf
        return self._least_tag

    def has_below(self, priority: int) -> bool:
        """Returns True if a prompt of less urgent priority, that is of a larger number, waits."""
        return bool(self._ids) and int(self._priorities[: len(self)].max()) > priority

    def places_to_take(self, tag: float, tenant: int | None, priority: int, links: Ints) -> Floats | None:
        """Returns for each instance the place just before its first prompt with a later tag, of another tenant and this
        priority, and behind all prompts in front of that one. Infinite if an instance has none; None if no instance
        has one. `tenant`: None = has no account yet."""
        num_rows = len(self)
        is_later = self._tags[:num_rows] > tag
        is_later &= self._priorities[:num_rows] == priority
        if tenant is not None:
            is_later &= self._tenants[:num_rows] != tenant
        rows = np.flatnonzero(is_later)
        if not rows.size:
            return None
        at, places = self._links[:num_rows], self._places[:num_rows]
        num_links = max(int(at.max()), int(links.max())) + 1
        first, last = np.full(num_links, math.inf), np.full(num_links, -math.inf)
        np.minimum.at(first, at[rows], places[rows])
        before = np.flatnonzero(places < first[at])
        np.maximum.at(last, at[before], places[before])
        places_taken: Floats = np.full(len(links), math.inf)
        here = np.flatnonzero(np.isfinite(first[links]))
        first, last = first[links[here]], last[links[here]]
        behind = np.minimum(last + _BEHIND_S, (last + first) / 2)
        places_taken[here] = np.where(np.isinf(last), first - _BEFORE_ALL_S, behind)
        return places_taken

    def _columns(self) -> tuple[Floats | Ints, ...]:
        return self._tags, self._places, self._links, self._tenants, self._priorities

    def _grow(self) -> None:
        self._tags, self._places = (np.resize(c, 2 * len(c)) for c in (self._tags, self._places))
        self._links, self._tenants, self._priorities = (
            np.resize(c, 2 * len(c)) for c in (self._links, self._tenants, self._priorities)
        )

    def tenants(self) -> list[int]:
        """Returns the tenant number of every row; for `validate`."""
        found: list[int] = self._tenants[: len(self)].tolist()
        return found

    def validate(self) -> None:
        assert self._row == {request_id: row for row, request_id in enumerate(self._ids)}
        assert {len(column) for column in self._columns()} == {len(self._tags)}
        assert self.least_tag() == self._tags[: len(self)].min(initial=math.inf)


OUTPUT_WEIGHT = 2  # prompt tokens that one answer token counts as (OSDI 2024, §5.1, after prices of services)
# Claim duration ÷ Retry-After: a client returns a little later than requested. If it does not return, the claim ends.
CLAIM_FACTOR = 2.0
MAX_CLAIM_S = 10.0
MAX_CLAIMS = 64  # the oldest ones are dropped, because each placement looks at all claims
# Gap between prompts placed at one instance at the same instant (traces, bursts), so another tenant's fits in between.
TIE_S = 1e-5
BURST_S = 1e-3  # room for a hundred ties; prompts further apart did not arrive at the same instant
_FIRST_SWEEP = 1024  # accounts at which stale ones are first dropped; tenants may be as many as requests


class TenantStanding(NamedTuple):
    """Standing of a request's tenant at placement. Tags and `served` are in tokens ÷ weight."""

    tenant: str
    weight: float
    tag: float
    served: float  # lower bound of all accounts
    in_flight: int  # service of the tenant's requests in flight, tokens

    @property
    def ahead_tokens(self) -> float:
        """Service that the tenant has had beyond the least served waiting tenant."""
        return (self.tag - self.served) * self.weight


@dataclass(slots=True, eq=False)
class _Account:
    number: int  # the tenant's number in `WaitingPrompts`
    weight: float
    tag: float  # of its latest request; never decreases
    finish: float  # the account: end of all service charged so far
    in_flight: int = 0  # service of requests in flight
    num_in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Charge:
    """Service charged for a request in flight."""

    tenant: str
    prompt_tokens: int  # to compute
    output_tokens: int  # expected

    @property
    def service(self) -> int:
        return self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens


class Fairness:
    """Accounts of all tenants that wait, have requests in flight or are ahead of others. Default weight: 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._waiting = WaitingPrompts()
        self._accounts: dict[str, _Account] = {}
        self._charges: dict[RequestId, _Charge] = {}
        self._claims: dict[str, float] = {}  # end of each tenant's claim; oldest first
        self._served = 0.0
        self._last: dict[tuple[int, int], float] = {}  # highest place taken, by link and priority
        self._num_accounts = 0
        self._sweep_at = _FIRST_SWEEP

    # ---- queries: nothing changes

    def standing(self, tenant: str) -> TenantStanding:
        """Returns the standing of a tenant's request that is placed now."""
        account, weight = self._accounts.get(tenant), self._weights.get(tenant, 1.0)
        served = self._served_now()
        if account is None:
            return TenantStanding(tenant, weight, served, served, 0)
        tag = max(served, account.finish, account.tag)
        return TenantStanding(tenant, weight, tag, served, account.in_flight)

    def places_to_take(self, standing: TenantStanding, priority: int, links: Ints) -> Floats | None:
        """Returns the place that a prompt takes at each instance: infinite if it overtakes no prompt there, None if it
        overtakes none at any instance."""
        account = self._accounts.get(standing.tenant)
        others = len(self._accounts) - (account is not None)
        if not others or not len(self._waiting):
            return None
        number = None if account is None else account.number
        return self._waiting.places_to_take(standing.tag, number, priority, links)

    def tie_s(self, place: float, priority: int, link: int) -> float:
        """Returns the seconds to add to `place` so that it follows prompts placed there at the same instant, else 0."""
        ahead_s = self._last.get((link, priority), -math.inf) - place
        return ahead_s + TIE_S if 0.0 <= ahead_s < BURST_S else 0.0

    def has_below(self, priority: int) -> bool:
        """Returns True if prompts of a larger priority number, which are less urgent, wait."""
        return self._waiting.has_below(priority)

    def waits(self, request_id: RequestId) -> bool:
        """Returns True if the request is placed and not known to be prefilled."""
        return request_id in self._waiting

    def claimed_until(self, standing: TenantStanding, now: float) -> float | None:
        """Returns the latest end of the claims of tenants with less in flight (÷ weight), or None."""
        found = [
            until
            for tenant, until in self._claims.items()
            if until > now and tenant != standing.tenant and self._has_less(tenant, standing)
        ]
        return max(found, default=None)

    def _has_less(self, tenant: str, standing: TenantStanding) -> bool:
        account, weight = self._accounts.get(tenant), self._weights.get(tenant, 1.0)
        in_flight = 0 if account is None else account.in_flight
        return in_flight / weight < standing.in_flight / standing.weight

    def _served_now(self) -> float:
        return max(self._served, self._waiting.least_tag()) if len(self._waiting) else self._served

    # ---- changes

    def charge(
        self,
        request_id: RequestId,
        standing: TenantStanding,
        *,
        prompt_tokens: int,
        output_tokens: float,
        place: float,
        link: int,
        priority: int,
    ) -> None:
        """Charges a request that is placed; its id is not in flight. `prompt_tokens`: to compute; `output_tokens`:
        expected; `place`: in the queue of the instance with this link."""
        self._served = self._served_now()
        charge = _Charge(standing.tenant, prompt_tokens, round(output_tokens))
        account = self._account(standing.tenant)
        account.tag = standing.tag
        account.finish = standing.tag + charge.service / account.weight
        account.in_flight += charge.service
        account.num_in_flight += 1
        self._charges[request_id] = charge
        self._claims.pop(standing.tenant, None)
        last = self._last.get((link, priority), -math.inf)
        self._last[link, priority] = max(last, place)
        self._waiting.add(
            request_id,
            tag=standing.tag,
            place=place,
            link=link,
            tenant=account.number,
            priority=priority,
        )

    def prefilled(self, request_id: RequestId) -> None:
        """Removes a request from the waiting ones. Unknown ids are ignored."""
        self._served = self._served_now()
        if self._waiting.remove(request_id) and not len(self._waiting):
            self._level_accounts()

    def drop_instance(self, link: int) -> None:
        """Removes the waiting prompts of an instance that has left. The charges stay until the requests end."""
        self._last = {key: place for key, place in self._last.items() if key[0] != link}
        for request_id in self._waiting.at(link):
            self.prefilled(request_id)

    def settle(self, request_id: RequestId, output_tokens: int | None = None) -> None:
        """Closes the charge of a request and corrects its tenant's account. `output_tokens`: None = as many as
        expected. A request that was never prefilled costs nothing. Unknown ids are ignored."""
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
            self._level_accounts()

    def claim(self, tenant: str, now: float, retry_after_s: float) -> None:
        """Gives a claim to a tenant whose request was rejected for load with a `retry_after_s`."""
        self._claims = {t: until for t, until in self._claims.items() if until > now}
        self._claims.pop(tenant, None)
        self._claims[tenant] = now + min(CLAIM_FACTOR * retry_after_s, MAX_CLAIM_S)
        if len(self._claims) > MAX_CLAIMS:
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
        """Drops accounts that are no different from new ones."""
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_in_flight or max(account.finish, account.tag) > self._served
        }
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._accounts))

    def _level_accounts(self) -> None:
        """Levels all accounts to the furthest one. Called when no prompt waits, so no tenant is ahead of another."""
        furthest = max((account.finish for account in self._accounts.values()), default=0.0)
        self._served = max(self._served, furthest)
        self._accounts = {t: a for t, a in self._accounts.items() if a.num_in_flight}

    def validate(self) -> None:
        """Raises AssertionError if accounts and charges disagree, or if an account could start behind a waiting tag."""
        self._waiting.validate()
        for tenant, account in self._accounts.items():
            own = [c.service for c in self._charges.values() if c.tenant == tenant]
            assert (account.in_flight, account.num_in_flight) == (sum(own), len(own))
        assert {c.tenant for c in self._charges.values()} <= self._accounts.keys()
        numbers = [account.number for account in self._accounts.values()]
        assert len(set(numbers)) == len(numbers)
        assert set(self._waiting.tenants()) <= set(numbers)
        assert len(self._claims) <= MAX_CLAIMS
        if len(self._waiting):
            assert self._served <= self._waiting.least_tag(), "an account could begin behind a tag"


def parse_weights(entries: Sequence[str]) -> dict[str, float]:
    """Parses entries of the form `tenant=weight`. Raises ConfigError."""
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
