"""Real processes for the tests: vLLM servers with the connector, and store nodes. Each keeps a log beside its model.

All listen on loopback. Each vLLM server computes with one thread: its sums then do not depend on the machine's load,
and two servers share two cores.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from moonserve.deploy.launcher.ports import free_port
from moonserve.vllm.serving.sampling import REMOTE_DECODE
from tests.patience import until
from tests.processes import ROOT
from tests.vllm import forks
from tests.vllm.models import VOCAB_SIZE

TOKEN = "vllm-tests"
BLOCK_SIZE = 32
MAX_NUM_SEQS = 16
START_S = 400.0
"""A server starts in 4 s of processor time, or 14 with the imports, and other work may have most of the machine."""
ANSWER_S = 240.0

ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_num_seqs": MAX_NUM_SEQS,
    "block_size": BLOCK_SIZE,
    "max_model_len": 8_192,
    "max_num_batched_tokens": 2_048,  # longer prompts are computed in several steps
}
"""Settings of all instances whose tokens are compared."""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core computes by itself: one process less to start
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
    "MOONSERVE_CLUSTER_TOKEN": TOKEN,
}


def as_flags(settings: Mapping[str, Any], prefix: str = "--") -> list[str]:
    return [
        part
        for name, value in settings.items()
        for part in (prefix + name.replace("_", "-"), *([] if value is True else [str(value)]))
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy completion. `logprobs[i]` belongs to `tokens[i]`; `num_cached` counts prompt tokens."""

    tokens: list[int]
    logprobs: list[float]
    num_cached: int = 0
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class VllmServer:
    """A vLLM server. `start` it, then `wait` until it serves."""

    model: Path
    log: Path
    connector: dict[str, Any] | None = None
    """`kv_connector_extra_config`; None = without the connector."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Settings beside ENGINE."""
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: BaseProcess | None = None

    @property
    def block_size(self) -> int:
        size: int = {**ENGINE, **self.engine}["block_size"]
        return size

    def start(self) -> None:
        # As the leader of a process group, so that `kill` reaches the engine's processes.
        module, environment = "vllm.entrypoints.openai.api_server", {**ENVIRONMENT, **self.environment}
        self.process = forks.start(module, self._flags(), environment, self.log)

    def _flags(self) -> list[str]:
        named = {**ENGINE, **self.engine, "model": str(self.model), "host": "127.0.0.1", "port": self.port}
        flags = as_flags(named)
        if self.connector is not None:
            transfer = {
                "kv_connector": "MoonserveConnector",
                "kv_connector_module_path": "moonserve.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": self.connector,
            }
            flags += ["--kv-transfer-config", json.dumps(transfer)]
        return [*flags, "--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *self.flags]

    def wait(self) -> None:
        """Waits until the server answers. Fails with the end of its log."""
        give_up_at = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.request("GET", "/health", timeout_s=5.0)
                return
            assert self.process is not None
            starts = self.process.is_alive() and time.monotonic() < give_up_at
            assert starts, f"the server does not start:\n{self.last_words()}"
            time.sleep(0.1)

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-6_000:]

    def signal(self, number: int) -> None:
        """Sends a signal to all processes of the server."""
        assert self.process is not None
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Ends the server by SIGKILL, at once. Idempotent."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.kill()  # also if it is not yet the leader of its group
            self.process.join()
            self.process = None

    def stop(self) -> None:
        """Ends the server by SIGTERM, and what is left of it by SIGKILL."""
        if self.process is not None:
            self.process.terminate()
            self.process.join(20.0)
        self.kill()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    # Requests

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        stream: bool = False,
        timeout_s: float = ANSWER_S,
        **parameters: Any,
    ) -> Answer:
        """Returns a greedy completion. `salt`: prompts with another salt share no KV. Raises OSError if the connection
        breaks or nothing arrives for `timeout_s`."""
        body = {
            "model": str(self.model),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "stream": stream,
            **({"cache_salt": salt} if salt else {}),
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **parameters,
        }
        text = self.request("POST", "/v1/completions", body, timeout_s=timeout_s)
        return _streamed(text) if stream else _answer([json.loads(text)])

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, concurrency: int, **parameters: Any
    ) -> list[Answer]:
        with ThreadPoolExecutor(concurrency) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, max_tokens, **parameters), prompts))

    def reset_prefix_cache(self) -> None:
        """Forgets all KV in the server's own memory."""
        self.request("POST", "/reset_prefix_cache")

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's values with these labels; 0 without any."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = self.request("GET", "/metrics").splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in found if all(each in line for each in wanted))

    def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> str:
        """Returns the body of a successful reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read().decode()
            assert reply.status == 200, f"{method} {path}: {reply.status} {text}\n{self.last_words()}"
            return text


def _streamed(text: str) -> Answer:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1:] == ["[DONE]"], f"the stream ended early: {text[-500:]}"
    return _answer([json.loads(event) for event in events[:-1]])


def _answer(parts: Sequence[dict[str, Any]]) -> Answer:
    """Joins the parts of a stream, or a single reply."""
    assert not any("error" in part for part in parts), parts
    choices = [choice for part in parts for choice in part["choices"]]
    details = [(part.get("usage") or {}).get("prompt_tokens_details") for part in parts]
    return Answer(
        tokens=[token for choice in choices for token in choice["token_ids"] or []],
        logprobs=[value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]],
        num_cached=next((each["cached_tokens"] for each in details if each), 0),
        kv_transfer_params=next((p["kv_transfer_params"] for p in parts if p.get("kv_transfer_params")), None),
    )


def disaggregated(
    prefill: VllmServer, decode: VllmServer, prompt: Sequence[int], max_tokens: int, *, salt: str = ""
) -> Answer:
    """Does what routers do: prefill by a request for one token, whose answer's parameters go into a streamed decode."""
    return decode_prefilled(decode, prompt, max_tokens, prefilled(prefill, prompt, salt=salt), salt=salt)


def prefilled(prefill: VllmServer, prompt: Sequence[int], *, salt: str = "") -> dict[str, Any]:
    """Returns the parameters with which a decode server finds the prompt's KV."""
    answer = prefill.complete(prompt, 1, salt=salt, kv_transfer_params=REMOTE_DECODE)
    assert answer.kv_transfer_params is not None
    return answer.kv_transfer_params


def decode_prefilled(
    decode: VllmServer, prompt: Sequence[int], max_tokens: int, parameters: dict[str, Any], *, salt: str = ""
) -> Answer:
    return decode.complete(prompt, max_tokens, salt=salt, stream=True, kv_transfer_params=parameters)


def until_shared(writer: VllmServer, reader: VllmServer) -> None:
    """Waits until one server loads what another one has just stored. After a fault each client of the store finds out
    by itself that the node is another one, or that it answers again."""

    def is_shared() -> bool:
        prompt = [random.randrange(VOCAB_SIZE - 1) for _ in range(4 * BLOCK_SIZE)]
        before = reader.metric("moonserve_connector_bytes_total", op="loaded")
        for server in (writer, reader):
            server.complete(prompt, 1)
        return reader.metric("moonserve_connector_bytes_total", op="loaded") > before

    until(is_shared)


@contextlib.contextmanager
def running(*servers: VllmServer) -> Iterator[None]:
    """Starts servers at once, and ends them."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.stop()
