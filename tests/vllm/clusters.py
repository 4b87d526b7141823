"""A cluster of `moonserve serve --engine vllm` for the tests, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil

from moonserve.deploy.launcher.local_cluster import LocalCluster
from moonserve.kvstore.client import connect
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import TOKEN_HEADER
from tests.patience import until
from tests.vllm.servers import START_S, TOKEN, Answer

PARAMETERS = {"ignore_eos": True, "return_token_ids": True}
FLAGS = (
    *("--engine", "vllm", "--worker-nice", "0", "--num-threads", "1"),
    *("--ttft-slo", "10000", "--tbt-slo", "10000"),  # a busy machine is no reason to refuse requests
)


class Cluster(LocalCluster):
    """A cluster of vLLM workers, asked over HTTP."""

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the JSON of an answer. Raises HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=START_S) as response:
            return json.load(response)

    def complete(self, prompt: Any, max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """Returns the only choice of a completion; greedy unless parameters say otherwise."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **PARAMETERS, **parameters}
        answer = self.call("/v1/completions", body)
        return {**answer["choices"][0], "usage": answer["usage"], "id": answer["id"]}

    def tokens(self, prompt: Any, max_tokens: int, **parameters: Any) -> list[int]:
        found: list[int] = self.complete(prompt, max_tokens, **parameters)["token_ids"]
        return found

    def answers(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, concurrency: int, **parameters: Any
    ) -> list[Answer]:
        """Returns greedy completions with their log probabilities."""

        def ask(prompt: Sequence[int]) -> Answer:
            found = self.complete(prompt, max_tokens, logprobs=1, **parameters)
            num_cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            return Answer(found["token_ids"], found["logprobs"]["token_logprobs"], num_cached)

        with ThreadPoolExecutor(concurrency) as threads:
            return list(threads.map(ask, prompts))

    @contextlib.contextmanager
    def stream(self, prompt: Any, max_tokens: int, **parameters: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Yields the events of a stream, and disconnects at the end of the block."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            **PARAMETERS,
            **parameters,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_S) as response:
            yield (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))

    def decision(self, answer_id: str) -> dict[str, Any]:
        """Returns the conductor's last decision on a request."""
        explained = self.call(f"/v1/requests/{answer_id.removeprefix('cmpl-')}/explain")
        found: dict[str, Any] = explained["decisions"][-1]
        return found

    def until_known(self, prompt: list[int], tokens: list[int]) -> None:
        """Waits until the conductor knows 9 blocks of a cached prompt when it places the prompt again."""

        def is_known() -> bool:
            again = self.complete(prompt, len(tokens))
            assert again["token_ids"] == tokens
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 288
            return bool(self.decision(again["id"])["prefill_candidates"][0]["device_blocks"] >= 9)

        until(is_known)

    def _process(self, instance_id: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        [found] = [child for child in children if f"--instance-id\0{instance_id}\0" in "\0".join(child.cmdline())]
        return found

    @property
    def registry(self) -> str:
        """Address of the directory, at which a client finds the store."""
        command = self._process("directory").cmdline()
        return f"127.0.0.1:{command[command.index('--port') + 1]}"

    def restart(self, *instance_ids: str) -> None:
        """Ends processes by SIGTERM, on which a store node writes what is only in memory to its disk, and waits until
        their successors serve."""
        before = {name: self._num_starts(name) for name in instance_ids}
        for name in instance_ids:
            self._process(name).terminate()
        until(lambda: all(self._num_starts(name) > count for name, count in before.items()), START_S)

    def _num_starts(self, instance_id: str) -> int:
        return self.output.count(f"{instance_id:12} ready\n")

    def kill(self, instance_id: str, *, engine_only: bool = False) -> list[psutil.Process]:
        """Kills a worker, or the processes of its engine, by SIGKILL. Returns all of them."""
        worker = self._process(instance_id)
        engine = worker.children(recursive=True)
        for process in engine if engine_only else [worker]:
            process.kill()
        return [worker, *engine]

    @contextlib.contextmanager
    def suspended_engine(self, instance_id: str) -> Iterator[None]:
        """Suspends the processes of a worker's engine for the length of the block."""
        engine = self._process(instance_id).children(recursive=True)
        for process in engine:
            process.suspend()
        try:
            yield
        finally:
            for process in engine:
                process.resume()

    def counters(self, instance_id: str) -> dict[str, int]:
        """Returns the counters of a worker."""
        with grpc.insecure_channel(self.instances()[instance_id]["rpc_address"]) as channel:
            stub, request = worker_pb2_grpc.WorkerStub(channel), worker_pb2.GetStatusRequest()
            status = stub.GetStatus(request, metadata=((TOKEN_HEADER, TOKEN),), timeout=START_S)
        return dict(status.counters)

    def stored_keys(self) -> set[bytes]:
        """Returns the keys of the store's objects."""
        with connect(self.registry, cluster_token=TOKEN) as client:
            [node] = client.nodes()
        with grpc.insecure_channel(node.address) as channel:
            stub, request = kvstore_pb2_grpc.KvStoreStub(channel), kvstore_pb2.StoreListRequest()
            replies = stub.List(request, metadata=((TOKEN_HEADER, TOKEN),), timeout=START_S)
            return {each.key for reply in replies for each in reply.objects}

    def instances(self) -> dict[str, dict[str, Any]]:
        return {each["instance_id"]: each for each in self.call("/v1/cluster")["instances"]}

    def num_requests(self, instance_id: str) -> int:
        load = self.instances()[instance_id]["load"]
        found: int = load["num_running"] + load["num_waiting"]
        return found

    def wait_until_idle(self) -> None:
        def is_idle() -> bool:
            workers = [each["load"] for name, each in self.instances().items() if not name.startswith("store")]
            return not any(load["num_running"] or load["num_waiting"] or load["held_blocks"] for load in workers)

        until(is_idle)

    def wait_until_complete(self) -> None:
        """Waits until all workers are members."""
        until(lambda: {"prefill-0", "decode-0", "decode-1"} <= self.instances().keys(), START_S)


def collect(events: Iterator[dict[str, Any]], moment: threading.Event) -> list[int]:
    """Returns the tokens of a stream. Sets `moment` once there are five."""
    tokens: list[int] = []
    for event in events:
        assert "error" not in event, event
        tokens += [token for choice in event["choices"] for token in choice["token_ids"] or ()]
        if len(tokens) >= 5:
            moment.set()
    return tokens


@contextlib.contextmanager
def running_cluster(model: Path, *flags: str, log_dir: Path) -> Iterator[Cluster]:
    cluster = Cluster(model, *FLAGS, *flags, log_dir=log_dir, environ={"MOONSERVE_CLUSTER_TOKEN": TOKEN})
    try:
        cluster.wait_until_ready(START_S)
        yield cluster
    finally:
        cluster.stop(60.0)
