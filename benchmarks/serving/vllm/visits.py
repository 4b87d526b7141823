"""Second visits of long prompts through a store that two vLLM servers share: moonserve's, and LMCache's server."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine.shapes import SMALL
from benchmarks.harness.measure import median, random_prompts, report_progress, table
from benchmarks.serving.vllm.deployments import (
    MOONSERVE_CONNECTOR,
    TOKEN,
    VLLM_PYTHON,
    Deployment,
    Process,
    vllm_server,
)
from moonserve.deploy.launcher.ports import free_port

LONG_PROMPT = 4000
OWN, PEER = "moonserve", "LMCache"
_MAX_SHARE = 0.3
_STORED_S = 1.0  # blocks are stored beside the next steps


class Visit(NamedTuple):
    """Medians of one kind of visit."""

    ttft_ms: float
    hit_ratio: float


@dataclass(slots=True, eq=False)
class SharedStore:
    """A store and its two servers, whose own caches are off."""

    name: str
    process: Process
    transfer: Mapping[str, Any]
    model: Path
    folder: Path
    servers: list[Deployment] = field(default_factory=list)
    visits: dict[str, list[Visit]] = field(default_factory=dict)

    def start_server(self) -> Deployment:
        port = free_port()
        log = self.folder / f"{self.name}-{port}.log"
        flags = "--no-enable-prefix-caching", "--enable-prompt-tokens-details"
        process = vllm_server(self.model, port, 1, log, self.transfer, *flags)
        self.servers.append(Deployment(f"{self.name}'s client", [process], f"http://127.0.0.1:{port}"))
        self.servers[-1].wait_until_serving()
        return self.servers[-1]

    def visit(self, kind: str, server: Deployment, prompt: Sequence[int]) -> None:
        report_progress(f"{self.name}: {kind}")
        self.visits.setdefault(kind, []).append(asyncio.run(_visit(server, prompt)))

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.process.close()


async def _visit(server: Deployment, prompt: Sequence[int]) -> Visit:
    async with server.client() as client:
        outcome = await server.complete(client, prompt, 2)
    if outcome.timeline is None:
        raise RuntimeError(f"{server.name}: {outcome.error}")
    return Visit(outcome.timeline.ttft_s * 1000, outcome.cached_tokens / len(prompt))


def _own(model: Path, folder: Path) -> SharedStore:
    port = free_port()
    argv = [sys.executable, "-m", "moonserve", "store", "--instance-id", "s", "--port", str(port), "--dram", "4GiB"]
    store = Process(argv, {"MOONSERVE_CLUSTER_TOKEN": TOKEN}, folder / "store.log")
    transfer = {**MOONSERVE_CONNECTOR, "kv_connector_extra_config": {"join": f"node://127.0.0.1:{port}"}}
    return SharedStore(OWN, store, transfer, model, folder)


def _peer(model: Path, folder: Path) -> SharedStore:
    port, http = free_port(), free_port()
    argv = [str(VLLM_PYTHON.parent / "lmcache"), "server", "--port", str(port), "--http-port", str(http)]
    argv += ["--l1-size-gb", "4", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    server = Process(argv, {"LMCACHE_TRACK_USAGE": "false"}, folder / "lmcache.log")
    server.wait_until_serving(f"http://127.0.0.1:{http}/healthcheck")
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    return SharedStore(PEER, server, transfer, model, folder)


_STORES: tuple[Callable[[Path, Path], SharedStore], ...] = (_own, _peer)


def second_visits(model: Path, folder: Path, rounds: int) -> dict[str, dict[str, Visit]]:
    """Returns medians by store and kind of visit; the stores are visited in turns."""
    warm, *prompts = random_prompts(rounds + 1, LONG_PROMPT, SMALL["vocab_size"], "visits")
    with contextlib.ExitStack() as stack:
        stores = []
        for start in _STORES:
            stores.append(stack.enter_context(contextlib.closing(start(model, folder))))
            for server in (stores[-1].start_server(), stores[-1].start_server()):
                asyncio.run(_visit(server, warm))
        for prompt in prompts:
            for store in stores:
                first, second = store.servers
                store.visit("first", first, prompt)
                time.sleep(_STORED_S)
                store.visit("at another server", second, prompt)
        for store in stores:
            store.servers[1].close()
            asyncio.run(_visit(store.start_server(), warm))
        for prompt in prompts:
            for store in stores:
                store.visit("after its restart", store.servers[-1], prompt)
    return {
        store.name: {
            kind: Visit(median([each.ttft_ms for each in found]), median([each.hit_ratio for each in found]))
            for kind, found in store.visits.items()
        }
        for store in stores
    }


def visits_table(visits: Mapping[str, Mapping[str, Visit]]) -> str:
    rows = [
        [
            store,
            kind,
            f"{visit.ttft_ms:.0f}",
            f"{visit.hit_ratio:.3f}",
            f"{visit.ttft_ms / of_kind['first'].ttft_ms:.2f}",
            f"{visit.ttft_ms / visits[PEER][kind].ttft_ms:.2f}",
        ]
        for store, of_kind in visits.items()
        for kind, visit in of_kind.items()
    ]
    headers = ("store", "visit", "TTFT ms", "hit ratio", f"÷ first (at most {_MAX_SHARE})", f"÷ {PEER}'s (at most 1)")
    return table(headers, rows)
