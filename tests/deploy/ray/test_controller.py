"""The controller's loop where Ray's head does not take what it is told. Ray itself is not there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from conductor.roles.controller import WorkerLoad
from deploy.ports import free_port
from deploy.ray import hosts
from deploy.ray.config import parse_cluster
from deploy.ray.events import Host, MembersSeen
from protocol.ids import InstanceId, Role
from protocol.pb import common_pb2, conductor_pb2
from protocol.wire import role_to_wire
from tests.patience import answered

pytest.importorskip("ray", reason="needs the extra `ray`")

from deploy.ray import actors
from deploy.ray.controller import Watch, members_of


async def test_a_start_that_the_head_did_not_write_down_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the process would count as starting for ever."""
    document = {"conductors": {"count": 1, "port": free_port()}, "stores": {"enabled": False}}
    away, made = ["head"], []

    def write(config: object, record: object) -> None:
        if away:
            raise RuntimeError("the head is away")

    def make(assignment: Any, host: object, generation: int) -> object:
        made.append(assignment.name)
        return object()

    raylet = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = raylet.sockets[0].getsockname()[1]
    resources = {"CPU": 8.0}
    host = Host(node_id="n0", address="127.0.0.1", resources=resources, is_head=True, answers=True)
    monkeypatch.setattr(hosts, "REFUSAL_S", 0.0)
    for name, fake in {
        "nodes": lambda: [(host, port)],
        "read_record": lambda config: None,
        "write_record": write,
        "find": lambda config, name: None,
        "make": make,
        "end": lambda *_: None,
    }.items():
        monkeypatch.setattr(actors, name, fake)
    watch = Watch(parse_cluster(document), "secret")

    async def looked() -> list[str]:
        with contextlib.suppress(RuntimeError):
            await watch._look()
        await asyncio.gather(*watch._tasks, return_exceptions=True)
        return made

    async with raylet:
        assert not await looked()
        away.clear()
        assert await answered(looked) == ["conductor"]


def test_what_the_conductor_says_of_workers_is_their_load() -> None:
    """Stores have none."""
    views = [
        conductor_pb2.InstanceView(
            endpoint=common_pb2.Endpoint(instance_id=name, epoch=3),
            role=role_to_wire(role),
            can_switch_role=True,
            need=0.5,
            use=0.25,
        )
        for name, role in (("store-1", Role.STORE), ("decode-0", Role.DECODE))
    ]
    load = WorkerLoad(
        instance_id=InstanceId("decode-0"), role=Role.DECODE, can_change=True, draining=False, need=0.5, use=0.25
    )
    assert members_of(views) == MembersSeen(epochs={"store-1": 3, "decode-0": 3}, loads=[load])
