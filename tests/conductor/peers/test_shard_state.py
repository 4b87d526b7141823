"""Active conductors in virtual time: they share instances equally, and send prompts away only for a gain."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.conductor import events
from moonserve.conductor.peers.shard_state import SILENT_AFTER_S, ShardState
from moonserve.conductor.placement.policies import make_policy
from moonserve.conductor.state import ConductorState
from moonserve.protocol.request import InstanceId, RequestId, RequestPhase, Role
from tests.conductor.cluster import USUAL, chain, endpoint, worker
from tests.thoroughness import examples


class Shards:
    """Several shards that exchange summaries; instances go where they are sent."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.shards = {f"host:{n}": ShardState(f"host:{n}") for n in range(count)}
        self.states = {a: ConductorState(make_policy("moonserve", 2.0), USUAL, None, s) for a, s in self.shards.items()}
        self.where: dict[str, str] = {}
        self.registrations: dict[str, events.Register] = {}
        self.silent: set[str] = set()
        self.num_moves = self._num_exchanges = 0

    def join(self, registration: events.Register, address: str) -> None:
        name = registration.endpoint.instance_id
        self.registrations[name], self.where[name] = registration, address
        self.states[address].handle(registration, self.now)

    def exchange(self) -> None:
        self.now += 0.25
        told = [self.states[a].tick_shard(self.now) for a in self.shards if a not in self.silent]
        for summary in told:
            for address, shard in self.shards.items():
                if address != summary.address:
                    shard.hear(summary, self.now)
        self._num_exchanges += 1
        for number, (name, address) in enumerate(list(self.where.items())):
            if (number + self._num_exchanges) % 4:
                continue
            beat = events.Heartbeat(instance_id=InstanceId(name), epoch=1, load=events.Load())
            *_, seen = self.states[address].handle(beat, self.now)
            assert isinstance(seen, events.HeartbeatSeen)
            if seen.move_to:
                self.num_moves += 1
                self.join(self.registrations[name], seen.move_to)
            self.states[address].validate()

    def place(self, address: str, name: str, **changes: object) -> events.Action:
        place = events.Place(
            request_id=RequestId(name), block_keys=chain(name, 20), num_prompt_tokens=201, max_tokens=10, **changes
        )
        return self.states[address].handle(place, self.now)[-1]


def registrations(num_prefills: int, num_decodes: int, homes: bool) -> list[events.Register]:
    made = [worker(f"p{n}", Role.PREFILL) for n in range(num_prefills)]
    made += [worker(f"d{n}", Role.DECODE) for n in range(num_decodes)]
    if homes:
        made = [
            worker(m.endpoint.instance_id, m.role, home_store=InstanceId(f"s{m.endpoint.instance_id[1:]}"))
            for m in made
        ]
        stores = {m.home_store for m in made if m.home_store is not None}
        made += [events.Register(endpoint=endpoint(name), role=Role.STORE) for name in sorted(stores)]
    return made


@settings(max_examples=examples(20))
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.randoms(use_true_random=False))
def test_instances_are_shared_equally_with_both_roles_together(
    count: int, num_prefills: int, num_decodes: int, homes: bool, dice: random.Random
) -> None:
    """Also if a shard joins last, without any. Instances with one home come together, so shares may differ."""
    shards = Shards(count)
    for each in registrations(num_prefills, num_decodes, homes):
        shards.join(each, f"host:{dice.randrange(max(count - 1, 1))}")
    for _ in range(count * 60):
        shards.exchange()
    moves = shards.num_moves
    for _ in range(count * 12):
        shards.exchange()
    assert shards.num_moves == moves, "instances move to and fro"
    parts = [{name for name, where in shards.where.items() if where == address} for address in shards.shards]
    counts = [tuple(sum(name[0] == letter for name in part) for letter in "pd") for part in parts]
    assert all(min(roles) > 0 or not any(roles) for roles in counts), "workers that can place nothing"

    if homes:
        assert all(shards.where[name] == shards.where[f"s{name[1:]}"] for name in shards.where)
    elif min(num_prefills, num_decodes) >= count:
        assert all(max(each) - min(each) <= 1 for each in zip(*counts, strict=True)), shards.where


def two_with_work(num_here: int, num_there: int) -> Shards:
    """Returns two shards of a prefill and a decode worker each, with this many prompts of two seconds in flight."""
    shards = Shards(2)
    for n in range(2):
        for name, role in ((f"p{n}", Role.PREFILL), (f"d{n}", Role.DECODE)):
            shards.join(worker(name, role), f"host:{n}")
    for address, count in zip(shards.shards, (num_here, num_there), strict=True):
        for number in range(count):
            shards.place(address, f"{address[-1]}-{number}", is_redirected=True)
    shards.exchange()
    shards.exchange()
    return shards


def test_a_prompt_with_a_long_wait_goes_where_none_wait() -> None:
    shards = two_with_work(5, 0)
    assert shards.place("host:0", "new") == events.Redirected(address="host:1")
    assert isinstance(shards.place("host:1", "new", is_redirected=True), events.Placed)


def test_a_prompt_stays_where_its_prefix_is_where_all_wait_or_where_it_was_sent() -> None:
    assert isinstance(two_with_work(9, 8).place("host:0", "all"), events.Placed)
    assert isinstance(two_with_work(2, 0).place("host:0", "returns"), events.Placed), "its later prompts come here"
    assert isinstance(two_with_work(9, 0).place("host:0", "sent", is_redirected=True), events.Placed)
    shards = two_with_work(4, 0)
    beat = events.Heartbeat(
        instance_id=InstanceId("p0"), epoch=1, load=events.Load(num_waiting=4, queued_tokens=800),
        changes=events.BlockChanges(first_seq=1, next_seq=21, added=tuple((key, key) for key in chain("known", 20))),
    )  # fmt: skip
    shards.states["host:0"].handle(beat, shards.now)
    assert isinstance(shards.place("host:0", "known"), events.Placed)


def test_time_outside_of_queues_is_no_reason_to_send_a_prompt_away() -> None:
    shards, times = two_with_work(0, 0), {"elapsed_s": 5.0, "queue_s": 0.0, "transfer_s": 0.0, "prefill_s": 2.0}
    for name in map(RequestId, ("first", "second", "third")):
        assert isinstance(shards.place("host:0", name), events.Placed)
        report = events.Report(request_id=name, phase=RequestPhase.FIRST_TOKEN, **times)
        shards.states["host:0"].handle(report, shards.now)


def test_a_silent_shard_gets_nothing_and_is_welcome_again() -> None:
    shards = two_with_work(0, 0)
    shards.silent.add("host:1")
    while shards.now < 2 * SILENT_AFTER_S:
        shards.exchange()
    assert all(isinstance(shards.place("host:0", f"new {n}"), events.Placed) for n in range(5))
    shards.silent.clear()
    shards.exchange()
    shards.exchange()
    assert isinstance(shards.place("host:0", "later"), events.Redirected)
