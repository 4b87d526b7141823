"""Real cluster of processes under test: requests to it, and the state that its processes report."""

import os
import random
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import psutil
from google.protobuf.message import Message

from benchmarks.faults.flipped_bytes import flip_bytes
from moonserve.deploy.launcher.local_cluster import LocalCluster
from moonserve.protocol.kv_blocks import BlockKey, block_keys, root_key
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import new_id
from moonserve.protocol.rpc.grpc_transport import TOKEN_HEADER
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from tests.stopping import stopped

# One compute thread per worker, exact numbers, objectives that are never missed, and store reads at any speed. Native
# kernels recompute output bit for bit (ARCHITECTURE.md, invariant 6); "auto" may mix in torch's kernels.
UNHURRIED = (
    *("--store-reads", "always"),
    *("--dtype", "float32", "--num-threads", "1", "--kernels", "native"),
    *("--ttft-slo", "10000", "--tbt-slo", "10000"),
)

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
"""Parameters of an answer whose every token is determined."""

SMALL = {"MOONSERVE_DRAM": "64MiB", "MOONSERVE_KV_CACHE_MEMORY": "64MiB"}
"""Environment of clusters with small models. Zeroing the memory that they have by default takes seconds."""

POLL_S = 0.05
"""Poll interval. Most conditions query three processes that share the processors with the awaited work."""


class Cluster(LocalCluster):
    """`moonserve serve` whose processes can be inspected."""

    def __init__(
        self, model: Path | None, *flags: str, log_dir: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self.model = model
        self.token = secrets.token_hex(8)
        self.headers: dict[str, str] = {}  # sent with every request, such as an API key
        # Next to other tests, workers with a positive nice value would wait seconds for processor time.
        own = {"MOONSERVE_CLUSTER_TOKEN": self.token, "MOONSERVE_WORKER_NICE": "0", **SMALL}
        own |= environ or {}
        super().__init__(model, *flags, log_dir=log_dir, environ=own)

    def wait_until_ready(self, timeout_s: float = 3 * PATIENCE_S) -> None:
        super().wait_until_ready(timeout_s)

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        return super().stop(timeout_s)

    def client(self) -> httpx.Client:
        """Returns a client for plain HTTP. It loads no certificates, which would take 30 ms of CPU time per client."""
        return httpx.Client(base_url=self.url, timeout=2 * PATIENCE_S, headers=self.headers, verify=False)

    def complete(self, prompt: Any, **parameters: Any) -> dict[str, Any]:
        """Returns one unary completion. Fails on any status except 200."""
        with self.client() as client:
            response = client.post("/v1/completions", json={"prompt": prompt, **parameters})
            assert response.status_code == 200, response.text
            return response.json()

    def greedy(self, prompt: Any, max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """Returns a completion with the parameters of `GREEDY`, unless `parameters` override them."""
        return self.complete(prompt, max_tokens=max_tokens, **{**GREEDY, **parameters})

    def decisions(self, request_id: str) -> list[dict[str, Any]]:
        """Returns the conductor's decisions about a request, one per choice and attempt."""
        with self.client() as client:
            reply = client.get(f"/v1/requests/{request_id}/explain")
        assert reply.status_code == 200, reply.text
        return reply.json()["decisions"]

    def metric(self, name: str) -> float:
        """Returns the sum of a metric's samples, as reported by the gateway."""
        with self.client() as client:
            return metric(client.get("/metrics").text, name)

    def fingerprint(self) -> str:
        with self.client() as client:
            return client.get("/v1/cluster").json()["fingerprint"]

    def keys_of(self, prompt: Sequence[int], block_size: int, salt: str = "") -> list[BlockKey]:
        """Returns the keys of the prompt's full blocks, derived as gateways derive them."""
        return block_keys(root_key(self.fingerprint(), salt), prompt, block_size)

    def instances(self) -> list[dict[str, Any]]:
        with self.client() as client:
            return client.get("/v1/cluster").json()["instances"]

    def instance(self, instance_id: str) -> dict[str, Any]:
        """Returns the cluster's view of a member. Retries, because a busy machine may lose a member for a moment."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (found := [i for i in self.instances() if i["instance_id"] == instance_id]):
            assert time.monotonic() < give_up_at, f"{instance_id} is no member"
            time.sleep(0.1)
        return found[0]

    def epoch(self, instance_id: str) -> int:
        """Returns the epoch of the instance's latest start, or 0 while it is not a member."""
        found = [i["epoch"] for i in self.instances() if i["instance_id"] == instance_id]
        return found[0] if found else 0

    def rpc(self, instance_id: str, stub: Callable[..., Any], method: str, request: Message) -> Any:
        """Returns a member's reply. Looks up its current address, because a restarted member has a new one."""
        return self.rpc_at(self.instance(instance_id)["rpc_address"], stub, method, request)

    def rpc_at(self, address: str, stub: Callable[..., Any], method: str, request: Message) -> Any:
        with grpc.insecure_channel(address) as channel:
            return getattr(stub(channel), method)(
                request, metadata=((TOKEN_HEADER, self.token),), timeout=PATIENCE_S, wait_for_ready=True
            )

    def conductor_address(self, name: str = "conductor") -> str:
        """Returns the address at which a conductor serves, according to its log."""
        log = (self.log_dir / f"{name}.log").read_text()
        return re.findall(r"ready rpc=([0-9.]+:[0-9]+)", log)[-1]

    def status(self, instance_id: str) -> worker_pb2.WorkerStatus:
        """Returns the current status that a worker reports."""
        request = worker_pb2.GetStatusRequest()
        return self.rpc(instance_id, worker_pb2_grpc.WorkerStub, "GetStatus", request)

    def store(self, instance_id: str = "store-0") -> kvstore_pb2.StoreStatsReply:
        """Returns the current statistics that a store node reports."""
        request = kvstore_pb2.StoreStatsRequest()
        return self.rpc(instance_id, kvstore_pb2_grpc.KvStoreStub, "Stats", request)

    def counters(self, instance_id: str) -> dict[str, int]:
        """Returns the counters of a worker or a store since its start."""
        is_store = instance_id.startswith("store")
        return dict((self.store if is_store else self.status)(instance_id).counters)

    def counter(self, instance_id: str, name: str) -> int:
        """Returns one counter, or 0 if it was never incremented."""
        return self.counters(instance_id).get(name, 0)

    # Content of the store

    def places(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Returns (offset, length) in store-0's memory for the leading keys whose objects it has."""
        lease_id = new_id("lease")  # the id of an ended lease is refused for ever
        stub = kvstore_pb2_grpc.KvStoreStub
        request = kvstore_pb2.StoreLeaseRequest(lease_id=lease_id, keys=keys, ttl_s=60)
        reply = self.rpc("store-0", stub, "Lease", request)
        self.rpc("store-0", stub, "Release", kvstore_pb2.StoreReleaseRequest(lease_id=lease_id))
        return [(stored.offset, stored.length) for stored in reply.objects]

    def num_indexed(self) -> int:
        """Returns the number of blocks that the conductor knows to be in stores."""
        return sum(i["indexed_blocks"] for i in self.instances() if i["role"] == "store")

    def wait_until_stored(self, prompts: Iterable[Sequence[int]], block_size: int) -> None:
        """Waits until all full blocks of these prompts are in store-0 and the conductor has indexed its objects."""
        for keys in (self.keys_of(prompt, block_size) for prompt in prompts):
            if keys:
                self.wait_for("the write-behind", lambda keys=keys: len(self.places(keys)) == len(keys))
        num_objects = self.store().num_objects
        self.wait_for("the index", lambda: self.num_indexed() >= num_objects)

    def flip_byte(self, prompt: Sequence[int], block: int, block_size: int) -> None:
        """Flips a bit in the middle of a prompt's block in the memory of store-0."""
        offset, length = self.places(self.keys_of(prompt, block_size))[block]
        flip_bytes(self.pids()["store-0"], [offset + length // 2], self.store().capacity_bytes)

    # Resources in use

    def in_use(self) -> list[str]:
        """Returns what is not free, per instance. Empty once everything is released and all instances are members."""
        roles = {each["instance_id"]: each["role"] for each in self.instances()}
        found: list[str] = []
        for name in self.pids():
            if name not in roles and name.startswith(("prefill", "decode", "store")):
                found.append(f"{name} is no member")
            elif name in roles:
                found += self._store_use(name) if roles[name] == "store" else self._use(name)
        return found

    def _use(self, name: str) -> list[str]:
        status = self.status(name)
        load = status.load
        counted = load.free_blocks + load.held_blocks + load.leased_blocks
        assert counted == status.num_blocks, f"{name} lost blocks: {status}"
        busy = load.held_blocks or load.leased_blocks or load.num_waiting or load.num_running
        return [f"{name}: {load}"] if busy else []

    def _store_use(self, name: str) -> list[str]:
        stats = self.store(name)
        counted = stats.free_bytes + stats.held_bytes + stats.leased_bytes + stats.reserved_bytes
        assert counted == stats.capacity_bytes, f"{name} lost bytes: {stats}"
        return [f"{name}: {stats}"] if stats.leased_bytes or stats.reserved_bytes else []

    def wait_until_all_is_free(self) -> None:
        """Fails if a pool still holds something for a request after `PATIENCE_S`."""
        self.wait_for("all pools free", lambda: not self.in_use())

    # Processes

    def pids(self) -> dict[str, int]:
        """Returns process ids by instance id. While an instance is being replaced, this is the newer process's id."""
        found: dict[str, tuple[float, int]] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                arguments, begun = child.cmdline(), (child.create_time(), child.pid)
            except psutil.NoSuchProcess:  # the process has just ended
                continue
            if "--instance-id" in arguments:
                name = arguments[arguments.index("--instance-id") + 1]
                found[name] = max(found.get(name, begun), begun)
        return {name: pid for name, (_, pid) in found.items()}

    def kill(self, instance_id: str) -> int:
        """Kills the instance with SIGKILL. Returns its epoch before."""
        return self.killer(instance_id)()

    def killer(self, instance_id: str) -> Callable[[], int]:
        """Returns a function that kills the instance at once, because the slow look-ups are done beforehand."""
        epoch, pid = self.epoch(instance_id), self.pids()[instance_id]

        def kill_now() -> int:
            os.kill(pid, signal.SIGKILL)
            return epoch

        return kill_now

    def restart(self, *instance_ids: str) -> None:
        """Kills these workers and waits until their successors, which have nothing cached, are members."""
        kills = [self.killer(name) for name in instance_ids]
        epochs = dict(zip(instance_ids, [kill() for kill in kills], strict=True))
        self.wait_for("the successors", lambda: all(self.epoch(name) > epoch for name, epoch in epochs.items()))

    def stopped(self, instance_id: str) -> AbstractContextManager[None]:
        """Suspends the process for the duration of the block, as if its machine had hung."""
        return stopped(self.pids()[instance_id])

    def logs(self) -> str:
        """Returns the end of every process's log, for the message of a failing test."""
        files = sorted(self.log_dir.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in files)

    def tracebacks(self) -> list[str]:
        """Returns the names of the logs that contain an unexpected exception."""
        files = sorted(self.log_dir.glob("*.log"))
        return [path.name for path in files if "Traceback" in path.read_text()]

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Waits until `condition` holds. Fails with the cluster's logs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {what}\n{self.output}\n{self.logs()}")
            time.sleep(POLL_S)


@contextmanager
def running_cluster(
    model: Path | None, log_dir: Path, *flags: str, environ: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """Yields a ready cluster, which must also stop cleanly. Allows for slow successors of workers on a busy machine."""
    patient = {"MOONSERVE_WORKER_PATIENCE_S": str(PATIENCE_S), **(environ or {})}
    cluster = Cluster(model, *flags, log_dir=log_dir, environ=patient)
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        if cluster.process.poll() is None:
            assert cluster.stop() == 0, cluster.output


@contextmanager
def small_cluster(
    folder: Path, *flags: str, context: int = 1024, environ: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """Yields a cluster of a small random byte-level model in `folder`/model, with `context` tokens of context."""
    make_model("llama", folder / "model", max_position_embeddings=context)
    with running_cluster(folder / "model", folder / "logs", *flags, environ=environ) as cluster:
        yield cluster


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """Returns the token ids of the first choice."""
    return answer["choices"][0]["token_ids"]


def cached_of(answer: dict[str, Any]) -> int:
    """Returns the number of prompt tokens whose KV was not computed for this answer."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt_of(name: object, length: int, vocab_size: int = 256) -> list[int]:
    """Returns a random prompt that depends only on the name and differs between names."""
    return random.Random(str(name)).choices(range(vocab_size), k=length)


def metric(text: str, name: str) -> float:
    """Returns the sum of a metric's samples in the Prometheus text format."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", re.MULTILINE)
    return sum(map(float, pattern.findall(text)))
