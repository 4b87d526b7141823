"""`Cluster`: a conductor state with short methods that feed it events. Shared by the conductor's tests."""

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from moonserve.conductor import events
from moonserve.conductor.placement.admission import Limits
from moonserve.conductor.placement.decision import Decision
from moonserve.conductor.placement.policies import make_policy
from moonserve.conductor.role_switching import RoleController
from moonserve.conductor.state import ConductorState
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, KvLayout
from moonserve.protocol.request import Endpoint, InstanceId, Placement, RequestId, Role
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile

# A block has 10 tokens and 1 MB, which takes 1 ms over the default network.
LAYOUT = KvLayout(num_layers=1, block_size=10, num_kv_heads=125, head_dim=100, dtype="float32")
# 10 ms per uncached token and no other cost, so that expected values can be worked out by hand.
PREFILL = PrefillProfile(c0=0.0, c1=0.01, c2=0.0)
# 10 ms per sequence in the batch.
DECODE = DecodeProfile(c0=0.0, c1=0.01, c2=0.0)
USUAL = Limits(ttft_slo_s=1000.0, tbt_slo_s=1000.0, lease_s=5.0)


def chain(name: str, count: int) -> tuple[BlockKey, ...]:
    """Returns the keys of the first `count` blocks of the prompt called `name`."""
    return tuple(BlockKey(f"{name}-{i}".encode().ljust(16, b".")) for i in range(count))


def endpoint(name: str, epoch: int = 1, host: str | None = None) -> Endpoint:
    return Endpoint(
        instance_id=name,
        epoch=epoch,
        rpc_address=f"{name}:1",
        transfer_address=f"{name}:2",
        host=host or f"host-of-{name}",
    )


def worker(name: str, role: Role, *, epoch: int = 1, host: str | None = None, **changes: Any) -> events.Register:
    """Returns the registration of a worker. `changes` sets fields of `Register`."""
    registration = events.Register(
        endpoint=endpoint(name, epoch, host),
        role=role,
        layout=LAYOUT,
        fingerprint="f1",
        num_blocks=1000,
        prefill_profile=PREFILL,
        decode_profile=DECODE,
        max_model_len=4000,
    )
    return replace(registration, **changes)


class Cluster:
    """A conductor under test and its virtual clock."""

    def __init__(
        self,
        *names: str,
        threshold: float = 2.0,
        policy: str = "global-cache-aware",
        validates: bool = True,
        roles: RoleController | None = None,
        **limits: Any,
    ) -> None:
        """Joins `names` in the role of their first letter: p (prefill), d (decode) or s (store). `validates`: check the
        state's invariants after every event. `limits` sets fields of `Limits`."""
        self.state = ConductorState(make_policy(policy, threshold), replace(USUAL, **limits), roles)
        self.now = 100.0
        self._validates = validates
        self._epochs: dict[str, int] = {}
        self._next_seq: dict[str, int] = {}
        for name in names:
            {"p": self.prefill, "d": self.decode, "s": self.store}[name[0]](name)

    def send(self, event: events.Event) -> list[events.Action]:
        actions = self.state.handle(event, self.now)
        if self._validates:
            self.state.validate()
        return actions

    def join(self, registration: events.Register) -> None:
        reply = self.send(registration)[-1]
        assert not isinstance(reply, events.Refused), reply
        self._epochs[registration.endpoint.instance_id] = registration.endpoint.epoch
        self._next_seq[registration.endpoint.instance_id] = 1

    def prefill(self, name: str, **changes: Any) -> None:
        self.join(worker(name, Role.PREFILL, **changes))

    def decode(self, name: str, **changes: Any) -> None:
        self.join(worker(name, Role.DECODE, **changes))

    def store(self, name: str, host: str | None = None) -> None:
        self.join(events.Register(endpoint=endpoint(name, host=host), role=Role.STORE))

    def heartbeat(
        self, name: str, load: events.Load | None = None, *, holds: Sequence[BlockKey] = (), draining: bool = False
    ) -> events.Action:
        """Sends a heartbeat that also reports the blocks in `holds` as added, and returns the reply."""
        first, added = self._next_seq[name], tuple((key, NO_PARENT) for key in holds)
        self._next_seq[name] = first + len(added)
        changes = events.BlockChanges(first_seq=first, next_seq=first + len(added), added=added)
        load, epoch = load or events.Load(free_blocks=1000), self._epochs[name]
        beat = events.Heartbeat(
            instance_id=InstanceId(name), epoch=epoch, load=load, changes=changes, draining=draining
        )
        return self.send(beat)[-1]

    def ask(self, request_id: str, **changes: Any) -> events.Action:
        """Returns the reply to a placement request. `changes` sets fields of `Place`."""
        wish = events.Place(request_id=RequestId(request_id), block_keys=(), num_prompt_tokens=100, max_tokens=10)
        return self.send(replace(wish, **changes))[-1]

    def place(self, request_id: str, *, keys: Sequence[BlockKey] = (), tokens: int = 100, **changes: Any) -> Placement:
        reply = self.ask(request_id, block_keys=tuple(keys), num_prompt_tokens=tokens, **changes)
        assert isinstance(reply, events.Placed), reply
        return reply.placement

    def reject(self, request_id: str, **changes: Any) -> events.Rejected:
        reply = self.ask(request_id, **changes)
        assert isinstance(reply, events.Rejected), reply
        return reply

    def refuse(self, request_id: str, **changes: Any) -> Exception:
        reply = self.ask(request_id, **changes)
        assert isinstance(reply, events.Refused), reply
        return reply.error

    def explain(self, request_id: str) -> Any:
        """Returns the decision record that `moonserve explain` receives, with JSON objects as attribute namespaces."""
        decision = self.state.explain(request_id)
        assert decision is not None
        return shown(decision)

    def report(
        self, request_id: str, phase: events.RequestPhase, elapsed_s: float = 1.0, **changes: Any
    ) -> list[events.Action]:
        """Reports a phase of a request and returns the resulting actions. `changes` sets fields of `Report`."""
        return self.send(events.Report(request_id=RequestId(request_id), phase=phase, elapsed_s=elapsed_s, **changes))


def shown(decision: Decision) -> Any:
    """Returns the JSON of a decision with its objects as attribute namespaces."""
    return json.loads(decision.to_json(), object_hook=lambda each: SimpleNamespace(**each))
