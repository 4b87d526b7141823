"""Invalid calls from a peer with the token, to every service of every process.

Each call is answered or refused with a reason, never with an internal error, and never ends a process. Afterwards the
cluster serves the same tokens, and no process has grown.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from moonserve.protocol.pb import (
    common_pb2,
    conductor_pb2,
    directory_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    leadership_pb2,
    metrics_pb2,
    registry_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from moonserve.protocol.rpc.grpc_transport import FAILURE_HEADER, TOKEN_HEADER
from tests.e2e.cluster import Cluster
from tests.processes import running
from tests.thoroughness import examples

_FILES = (*(conductor_pb2, directory_pb2, kvstore_pb2, leadership_pb2), *(metrics_pb2, registry_pb2, worker_pb2))
SERVICES: dict[str, ServiceDescriptor] = {
    service.name: service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values()
}
OURS = {
    "conductor": {"Conductor", "Metrics"},
    "store-0": {"KvStore", "Metrics"},
    "prefill-0": {"Worker", "Draining", "KvMemory", "Metrics"},
    "decode-0": {"Worker", "Draining", "Landing", "KvMemory", "Metrics"},
    "directory": {"Directory", "Registry", "Metrics"},
}
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32MiB", "--ttft-slo", "10000")
CALL_S = 0.2
MAX_GROWTH_BYTES = 48 << 20
PROMPT = "def size(path):\n" * 8


@dataclass(frozen=True)
class Target:
    name: str
    address: str
    token: str
    service: ServiceDescriptor

    def call(self, method: MethodDescriptor, request: Message) -> grpc.StatusCode:
        """Calls the method and returns the status. Fails on an internal error."""
        with grpc.insecure_channel(self.address) as channel:
            shape = channel.unary_stream if method.server_streaming else channel.unary_unary
            stub: Any = shape(
                f"/{self.service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            try:
                reply = stub(request, timeout=CALL_S, metadata=((TOKEN_HEADER, self.token),))
                if method.server_streaming:
                    next(iter(reply), None)
                    reply.cancel()
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                    told = dict(error.trailing_metadata() or ()).get(FAILURE_HEADER)
                    what = f"{self.name} {method.name}({str(request)[:2000]}): {error.details()}"
                    assert isinstance(told, bytes), what
                    assert common_pb2.Failure.FromString(told).code != "internal", what
                return error.code()
        return grpc.StatusCode.OK


_MAX_DEPTH = 4

_WORDS = st.one_of(
    st.sampled_from(["", "prefill-0", "decode-0", "store-0", "gateway-0", "conductor", "127.0.0.1:1", "host"]),
    st.sampled_from(["x" * 5_000, "../../etc/passwd", "lean://127.0.0.1:1", "\0", "ünïcödé", "{}"]),
    st.text(max_size=12),
)
_BYTES = st.one_of(
    st.sampled_from([b"", bytes(16), b"\1" * 16, b"short", bytes(65 * 1024), b"\xff" * 32]), st.binary(max_size=40)
)
_FLOATS = st.one_of(st.sampled_from([0.0, -1.0, 1e-300, 1e308, math.inf, -math.inf, math.nan]), st.floats(0, 10))


def _whole(low: int, high: int) -> st.SearchStrategy[int]:
    edges = {low, high, 0, 1, 2, 31, 32, 4096, 65536, 1 << 20, 1 << 31, 1 << 62, -1, high - 1}
    return st.sampled_from(sorted(n for n in edges if low <= n <= high)) | st.integers(0, 100)


_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _whole(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: _whole(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: _whole(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: _whole(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOATS,
    FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from([0.0, -1.0, 1.0, math.inf, math.nan]),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 5) | st.just(17),
}


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Generates any message of a type. The values of fields without presence include their defaults."""
    named = {
        field.name: st.deferred(lambda field=field: _values(field, depth))
        for field in descriptor.fields
        if field.message_type is None or (depth < _MAX_DEPTH and not field.message_type.GetOptions().map_entry)
    }
    optional = {name: named.pop(name) for name in list(named) if descriptor.fields_by_name[name].has_presence}
    make = GetMessageClass(descriptor)
    return st.fixed_dictionaries(named, optional=optional).map(lambda given: make(**given))


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    one: st.SearchStrategy[Any]
    if field.message_type is not None:
        one = messages(field.message_type, depth + 1)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        one = _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _WORDS
    else:
        one = _SCALARS[field.cpp_type]
    return st.lists(one, max_size=3) if field.is_repeated else one


@pytest.fixture(scope="module")
def addresses(cluster: Cluster) -> Iterator[dict[str, str]]:
    """gRPC addresses by process. The directory runs next to the cluster, because `serve` starts none."""
    found = {each["instance_id"]: each["rpc_address"] for each in cluster.instances()}
    found["conductor"] = cluster.conductor_address()
    flags = ("--instance-id", "directory")
    with running("directory", *flags, token=cluster.token) as (_, facts):
        yield {**found, "directory": facts["rpc"]}


@pytest.mark.parametrize("name", OURS)
def test_invented_call_is_refused_with_matching_error(cluster: Cluster, addresses: dict[str, str], name: str) -> None:
    right = _answer(cluster)
    before = _memory(cluster)
    for service in sorted(OURS[name]):
        target = Target(name, addresses[name], cluster.token, SERVICES[service])
        _lie_to(target)
    # A peer with the token may drain workers and change policies and limits.
    serves: Message = worker_pb2.SetDrainingRequest(draining=False)
    for drained in ("prefill-0", "decode-0"):
        cluster.rpc_at(addresses[drained], worker_pb2_grpc.DrainingStub, "SetDraining", serves)
    serves = kvstore_pb2.StoreSetDrainingRequest()
    cluster.rpc_at(addresses["store-0"], kvstore_pb2_grpc.KvStoreStub, "SetDraining", serves)
    cluster.wait_for("the same tokens again", lambda: _answer(cluster) == right)
    grown = {k: v - before[k] for k, v in _memory(cluster).items() if k in before}
    assert grown.keys() == before.keys(), "a process has ended"
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown


def test_invented_calls_cover_every_service_of_the_protocol() -> None:
    """All services are covered except those with their own tests: changes of role, several conductors, stages, and
    handoffs between engines of other projects."""
    elsewhere = {"RoleSwitch", "Leadership", "EngineHandoff"}
    assert set().union(*OURS.values()) | elsewhere == set(SERVICES)


def _lie_to(target: Target) -> None:
    calls = st.sampled_from(list(target.service.methods)).flatmap(
        lambda method: st.tuples(st.just(method), messages(method.input_type))
    )

    @settings(
        max_examples=examples(15),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(calls)
    def lie(call: tuple[MethodDescriptor, Message]) -> None:
        target.call(*call)

    lie()


def _answer(cluster: Cluster) -> str | None:
    with cluster.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
        return str(answer.json()["choices"][0]["token_ids"]) if answer.is_success else None


def _memory(cluster: Cluster) -> dict[int, int]:
    """Returns resident memory in bytes, by process id of the launcher's children."""
    children = psutil.Process(cluster.process.pid).children()
    return {child.pid: child.memory_info().rss for child in children}
