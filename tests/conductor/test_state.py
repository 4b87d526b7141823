"""State machine test: random joins, deaths, false reports, placements and policy changes keep the books consistent.

Two states receive the same events and must give the same answers. Every placement ends exactly once: by the report of
its end, by being placed again, or by being forgotten.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonserve.conductor import events
from moonserve.conductor.placement.admission import STEP_SHARE, TENANT_SHARE, AdmissionMode, Limits
from moonserve.conductor.placement.policies import POLICY_NAMES, make_policy
from moonserve.conductor.state import ConductorState
from moonserve.protocol.errors import InvalidRequest, NoWorker, StaleLease
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey
from moonserve.protocol.request import InstanceId, RequestId, Role
from tests.conductor.cluster import LAYOUT, chain, shown, worker
from tests.thoroughness import any_order

ROLES = {
    **{f"p{i}": Role.PREFILL for i in range(3)},
    **{f"d{i}": Role.DECODE for i in range(2)},
    **{f"s{i}": Role.STORE for i in range(2)},
}
instances = st.sampled_from(sorted(ROLES))
requests = st.sampled_from([RequestId(f"r{i}") for i in range(8)])
prompts = st.sampled_from(["a", "b"])
policies = st.sampled_from(POLICY_NAMES)
# Includes the largest values that the fields of conductor.proto hold, although no worker could have them.
counts, tokens = st.integers(0, 40) | st.just(2**32 - 1), st.integers(0, 400) | st.just(2**64 - 1)
loads = st.builds(
    events.Load,
    num_running=counts,
    free_blocks=counts,
    leased_blocks=counts,
    context_tokens=tokens,
    queued_tokens=tokens,
)


def wish(prompt: str, num_tokens: int, **others: Any) -> events.Place:
    return events.Place(block_keys=chain(prompt, num_tokens // 10), num_prompt_tokens=num_tokens, **others)


wishes = st.builds(
    wish,
    prompts,
    st.integers(0, 150),
    request_id=requests,
    max_tokens=st.integers(0, 50),
    tenant=st.sampled_from(["", "t", "u"]),
    priority=st.integers(-1, 1),
    excluded_instances=st.frozensets(instances, max_size=2),
    session_id=st.sampled_from([None, "x", "y"]),
)
times = st.none() | st.floats(0.0, 1e6)
# Includes impossible times and counts.
reports = st.builds(
    events.Report,
    request_id=requests,
    phase=st.sampled_from(events.RequestPhase),
    elapsed_s=st.just(0.5),
    cached_tokens=st.integers(0, 200),
    output_tokens=st.integers(0, 50),
    queue_s=times,
    transfer_s=times,
    prefill_s=times,
)


class ConductorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.epochs: dict[str, int] = {}
        self.next_seq: dict[str, int] = {}
        self.live: set[RequestId] = set()  # placed and not ended

    @initialize(
        policy=policies,
        present=st.sets(instances, min_size=4),
        admission=st.sampled_from(AdmissionMode),
        by_priority=st.booleans(),
    )
    def begin(self, policy: str, present: set[str], admission: AdmissionMode, by_priority: bool) -> None:
        self.admission = admission
        limits = Limits(
            ttft_slo_s=4.0,
            tbt_slo_s=0.05,
            admission=admission,
            lease_s=5.0,
            placement_ttl_s=20.0,
            tenant_weights={"u": 3.0},
            by_priority=by_priority,
        )
        self.state, self.twin = (ConductorState(make_policy(policy, 1.5), limits) for _ in "ab")
        for name in sorted(present):
            self.join(name, newer=False)

    def send(self, event: events.Event) -> events.Action:
        actions = self.state.handle(event, self.now)
        assert repr(actions) == repr(self.twin.handle(event, self.now)), "equal histories differ"
        for action in actions:
            if isinstance(action, events.PlacementForgotten):
                self.live.remove(action.request_id)  # raises KeyError if it had already ended
        return actions[-1] if actions else events.Tick()

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.now += 21.0
            self.send(events.Tick())
            assert not self.live, "placements whose end nobody reported are forgotten"
            self.state.validate()

    @rule(name=instances, newer=st.booleans())
    def join(self, name: str, newer: bool) -> None:
        epoch = max(self.epochs.get(name, 1) + (1 if newer else 0), 1)
        if newer or name not in self.epochs:
            self.next_seq[name] = 1
        self.epochs[name] = epoch
        home = f"s{name[1]}" if ROLES[name] is Role.PREFILL else None
        registration = worker(name, ROLES[name], home_store=home, epoch=epoch, num_blocks=60)
        assert not isinstance(self.send(registration), events.Refused)

    @rule(name=instances)
    def join_with_an_old_epoch(self, name: str) -> None:
        if self.epochs.get(name, 1) < 2:
            return
        self.send(events.Tick())
        known = name in {v.endpoint.instance_id for v in self.state.cluster(self.now).instances}
        if known:
            reply = self.send(worker(name, ROLES[name]))
            assert isinstance(reply, events.Refused)
            assert isinstance(reply.error, StaleLease)

    @rule(name=instances)
    def leave(self, name: str) -> None:
        self.send(events.Deregister(instance_id=InstanceId(name), epoch=self.epochs.get(name, 1)))

    @rule(
        name=instances,
        load=loads,
        keys=st.builds(lambda prompt, span: chain(prompt, 10)[span], prompts, st.slices(10)),
        removes=st.booleans(),
        skips=st.booleans(),
        draining=st.booleans(),
    )
    def heartbeat(
        self, name: str, load: events.Load, keys: tuple[BlockKey, ...], removes: bool, skips: bool, draining: bool
    ) -> None:
        first = self.next_seq.get(name, 1) + (3 if skips else 0)
        changes = events.BlockChanges(
            first_seq=first,
            next_seq=first + len(keys),
            added=() if removes else tuple((key, NO_PARENT) for key in keys),
            removed=keys if removes else (),
        )
        epoch = self.epochs.get(name, 1)
        beat = events.Heartbeat(
            instance_id=InstanceId(name), epoch=epoch, load=load, changes=changes, draining=draining
        )
        reply = self.send(beat)
        assert isinstance(reply, events.HeartbeatSeen)
        if reply.known and not reply.resync:
            self.next_seq[name] = changes.next_seq

    @rule(name=policies, threshold=st.sampled_from([1.0, 2.0]), seed=st.integers(0, 3))
    def switch(self, name: str, threshold: float, seed: int) -> None:
        for state in (self.state, self.twin):
            state._planner.policy = make_policy(name, threshold, seed)

    @rule(event=wishes)
    def place(self, event: events.Place) -> None:
        reply, request_id = self.send(event), event.request_id
        self.live.discard(request_id)  # placing a request again ends its first placement, whatever the reply
        match reply:
            case events.Placed():
                self.live.add(request_id)
                self.check_placed(reply, event)
            case events.Rejected():
                assert self.admission is not AdmissionMode.NONE
                assert reply.retry_after_s > 0
                decision = reply.decision
                assert (
                    reply.predicted_ttft_s > decision.ttft_slo_s
                    or reply.predicted_tbt_s > STEP_SHARE * decision.tbt_slo_s
                ) == (reply.reason != TENANT_SHARE)
            case events.Refused():
                assert isinstance(reply.error, NoWorker | InvalidRequest)
            case _:
                raise AssertionError(reply)

    def check_placed(self, reply: events.Placed, event: events.Place) -> None:
        placement, decision = reply.placement, shown(reply.decision)
        named = {placement.prefill.instance_id, placement.decode.instance_id}
        named |= {s.store.instance_id for s in placement.prefix_sources}
        assert not named & event.excluded_instances
        chosen = next(c for c in decision.prefill_candidates if c.instance_id == decision.prefill)
        position = chosen.device_blocks
        for source in placement.prefix_sources:
            assert source.first_block == position, "sources leave no gap"
            assert source.num_blocks > 0
            position += source.num_blocks
        assert position == chosen.reuse_blocks, "what is counted on is named"
        assert chosen.reuse_blocks * LAYOUT.block_size < event.num_prompt_tokens
        assert decision.expected_output >= 0.0
        if self.admission is not AdmissionMode.NONE:
            assert placement.predicted_ttft_s <= decision.ttft_slo_s
            assert placement.predicted_tbt_s <= decision.tbt_slo_s

    @rule(report=reports)
    def report(self, report: events.Report) -> None:
        self.send(report)
        if report.phase is not events.RequestPhase.FIRST_TOKEN:
            self.live.discard(report.request_id)

    @rule(seconds=st.floats(0.0, 6.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.send(events.Tick())

    @invariant()
    def books_agree(self) -> None:
        self.state.validate()


TestRandomHistories = any_order(ConductorMachine, 75, derandomize=True)
