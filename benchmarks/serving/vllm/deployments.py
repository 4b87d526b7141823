"""Ways to serve one model on two cores, each as processes of its own that can be stopped while another is measured."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.latency import Timeline
from moonserve.traces.client import Outcome, StreamClient
from moonserve.vllm.serving.sampling import REMOTE_DECODE

ROOT = Path(__file__).parent.parent.parent.parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TOKEN = "benchmark"
_START_S = 240.0
_STOP_S = 20.0
_ENGINE = ("--enforce-eager", "--block-size=32", "--max-num-seqs=32")
VLLM_FLAGS = tuple(flag.replace("--", "--vllm.") for flag in _ENGINE)
"""The same options for `moonserve serve --engine vllm`."""
_MAX_LEN = 4352
_KV_BYTES = 384 << 20  # of each server: 32 requests of the benchmark need 226 MiB


class Process:
    """One program with its own log."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                argv, env={**os.environ, **environment}, stdout=file, stderr=file, start_new_session=True, cwd=ROOT
            )
        self._log = log

    def wait_until_serving(self, url: str) -> None:
        give_up_at = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                return
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"{url} is not served: {self._log.read_text()[-6000:]}")
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        """Sends a signal to the program and all its descendants."""
        _signal(self._family(), number)

    def close(self) -> None:
        family = self._family()
        _signal(family, signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        _signal(family, signal.SIGKILL)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        try:
            program = psutil.Process(self._process.pid)
            return [program, *program.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def vllm_server(
    model: Path,
    port: int,
    threads: int,
    log: Path,
    transfer: Mapping[str, Any] | None,
    *flags: str,
    imports: Path = ROOT,
) -> Process:
    """Starts a vLLM server whose model runs in `threads` threads, with a KV connector if `transfer` is given."""
    argv = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *_ENGINE, *flags]
    argv += ["--dtype", "bfloat16"]
    argv += ["--skip-tokenizer-init", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(_MAX_LEN)]
    argv += ["--disable-uvicorn-access-log", "--served-model-name", "model"]
    argv += ["--kv-cache-memory-bytes", str(_KV_BYTES)]
    if transfer is not None:
        argv += ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **transfer})]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # computes in the engine core, beside which workers would spin
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join({str(imports): None, str(ROOT): None}),
        "MOONSERVE_CLUSTER_TOKEN": TOKEN,
    }
    return Process(argv, environment, log)


MOONSERVE_CONNECTOR = {
    "kv_connector": "MoonserveConnector",
    "kv_connector_module_path": "moonserve.vllm.connector",
    "kv_load_failure_policy": "recompute",
}
NIXL_CONNECTOR = {"kv_connector": "NixlConnector", "kv_load_failure_policy": "recompute"}
RESTING_NIXL = Path(__file__).parent / "resting_nixl"
"""On the import path, lets NIXL's progress threads rest between two polls."""


class Deployment:
    """Processes that serve the model at one URL."""

    def __init__(self, name: str, processes: Sequence[Process], url: str, ready_path: str = "/health") -> None:
        self.name = name
        self._processes = processes
        self._url = url
        self._ready_path = ready_path

    def wait_until_serving(self) -> None:
        for process in self._processes:
            process.wait_until_serving(self._url + self._ready_path)

    def pause(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGCONT)

    def close(self) -> None:
        for process in self._processes:
            process.close()

    async def complete(self, client: StreamClient, prompt: Sequence[int], max_tokens: int) -> Outcome:
        return await client.complete("model", prompt, max_tokens=max_tokens)

    def client(self) -> StreamClient:
        return StreamClient(self._url)


class Disaggregated(Deployment):
    """A prefill and a decode server, between which this process is the router."""

    def __init__(self, name: str, prefill: tuple[Process, str], decode: tuple[Process, str]) -> None:
        super().__init__(name, [prefill[0], decode[0]], decode[1])
        self._prefill, self._urls = prefill, (prefill[1], decode[1])

    def wait_until_serving(self) -> None:
        for process, url in zip(self._processes, self._urls, strict=True):
            process.wait_until_serving(url + self._ready_path)

    async def complete(self, client: StreamClient, prompt: Sequence[int], max_tokens: int) -> Outcome:
        """The time to the first token counts from the first call, as routers' clients see it."""
        arrived_at = time.monotonic()
        outcome = await self.decode(client, prompt, max_tokens)
        if outcome.timeline is None:
            return outcome
        timeline = Timeline(arrived_at, outcome.timeline.token_at)
        return Outcome(
            status=outcome.status,
            error=outcome.error,
            timeline=timeline,
            token_ids=outcome.token_ids,
        )

    async def decode(self, client: StreamClient, prompt: Sequence[int], max_tokens: int) -> Outcome:
        """As `complete`, but times count from the second call: the first token's is of the handoff and one step."""
        body = {"model": "model", "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{self._urls[0]}/v1/completions",
                json={**body, "stream": False, "kv_transfer_params": REMOTE_DECODE, "return_token_ids": True},
            ) as response,
        ):
            answer = await response.json()
        parameters = {"kv_transfer_params": answer["kv_transfer_params"]}
        return await client.complete("model", prompt, max_tokens=max_tokens, extra=parameters)


def vllm_alone(model: Path, folder: Path) -> Deployment:
    port = free_port()
    process = vllm_server(model, port, 2, folder / "vllm.log", None, "--no-enable-prefix-caching")
    return Deployment("vLLM alone", [process], f"http://127.0.0.1:{port}")


def disaggregated(
    name: str, model: Path, folder: Path, transfer: Mapping[str, Any], imports: Path = ROOT
) -> Disaggregated:
    halves = []
    for role in ("prefill", "decode"):
        port = free_port()
        log = folder / f"{name.replace(' ', '-')}-{role}.log"
        process = vllm_server(model, port, 1, log, transfer, "--no-enable-prefix-caching", imports=imports)
        halves.append((process, f"http://127.0.0.1:{port}"))
    return Disaggregated(name, *halves)


def moonserve_cluster(name: str, model: Path, folder: Path, *flags: str) -> Deployment:
    """Starts `moonserve serve` with one prefill and one decode worker, of one thread each."""
    port = free_port()
    argv = [sys.executable, "-m", "moonserve", "serve", str(model), "--port", str(port)]
    argv += ["--served-model-name", "model", "--dtype", "bfloat16", "--kv-cache-memory", str(_KV_BYTES)]
    argv += ["--max-model-len", str(_MAX_LEN), "--ttft-slo", "1000", "--tbt-slo", "1000", *flags]  # nothing is rejected
    process = Process(argv, {"MOONSERVE_VLLM_PYTHON": str(VLLM_PYTHON)}, folder / f"{name.replace(' ', '-')}.log")
    return Deployment(name, [process], f"http://127.0.0.1:{port}", "/ready")
