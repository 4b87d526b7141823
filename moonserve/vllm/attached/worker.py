"""A worker beside a vLLM server that someone else runs, of either role: options, membership while the server answers.

While the server does not answer, the worker is no member of the cluster, and its requests continue elsewhere. It joins
again, as a new incarnation with an empty list of cached blocks, once the server answers.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import dataclass

import aiohttp

from moonserve.protocol.errors import ConfigError, PeerLost
from moonserve.protocol.process.config import option
from moonserve.protocol.process.event_loop import wait_event
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.tracing import tracing
from moonserve.protocol.request import Role
from moonserve.vllm.attached.completions import REFUSED
from moonserve.vllm.attached.engine import HEALTH_INTERVAL_S, AttachedEngine, ServerLost, VllmServer
from moonserve.vllm.attached.server_facts import facts_of, model_config, update_figures
from moonserve.vllm.serving.config import EngineWorkerConfig
from moonserve.vllm.serving.kv_event_state import KvEventSource
from moonserve.vllm.serving.speed_profile import measure
from moonserve.vllm.serving.worker import Profiles, serve_engine

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class AttachedConfig(EngineWorkerConfig):
    """Options of a worker with `--engine vllm --attach`, of either role."""

    attach: str = option(help="URL of a running vLLM server with OpenAI's API, as http://host:8000")
    attach_api_key: str = option("", help="the server's API key", secret=True)
    model: str | None = option(
        None, help="the server's model, whose config.json is read: folder or hub name; default: as the server names it"
    )
    max_num_seqs: int = option(256, help="the server's --max-num-seqs")
    kv_events: str | None = option(
        None, help="ZMQ endpoint of the server's KV events, as tcp://host:5557; default: its cached prompts are unknown"
    )
    kv_events_replay: str | None = option(None, help="ZMQ endpoint at which the server repeats KV events")
    kv_events_topic: str = option("", help="topic of the server's KV events")

    def event_source(self) -> KvEventSource | None:
        """Returns where KV events come from; None = nowhere. Raises ConfigError if they cannot be received."""
        if self.kv_events is None:
            return None
        if missing := [name for name in ("msgspec", "zmq") if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"--kv-events needs {' and '.join(missing)}: pip install 'moonserve[kv-events]'")
        for endpoint in (self.kv_events, self.kv_events_replay):
            if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"--kv-events {endpoint} must be an endpoint of ZMQ, as tcp://host:5557")
        return KvEventSource(endpoint=self.kv_events, replay=self.kv_events_replay, topic=self.kv_events_topic)


async def serve_prefill(config: AttachedConfig, lifecycle: Lifecycle) -> None:
    """Runs a prefill worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    await _serve(config, Role.PREFILL, lifecycle)


async def serve_decode(config: AttachedConfig, lifecycle: Lifecycle) -> None:
    """Runs a decode worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    await _serve(config, Role.DECODE, lifecycle)


async def _serve(config: AttachedConfig, role: Role, lifecycle: Lifecycle) -> None:
    events = config.event_source()
    log.info("attached to %s, %s", config.attach, _limits(events))
    profiles: Profiles | None = None
    # A connection that the server closes for idleness while a request is on its way would look like a loss.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    with tracing(config, config.instance_id, role.value) as tracer:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            server = VllmServer(session, config.attach, config.attach_api_key, config.instance_id)
            while await _answers(server, lifecycle):
                try:
                    engine = await _engine(config, server, events)
                    if role is Role.PREFILL:
                        await engine.find_connector()
                        if not engine.has_connector:
                            log.warning("the server has no MoonserveConnector: decode workers compute prompts again")
                    lifecycle.progress("measuring")
                    profiles = profiles or await measure(engine)
                    await serve_engine(config, role, engine, profiles, lifecycle, tracer)
                    return
                except (ServerLost, PeerLost) as error:
                    log.warning("out of the cluster until the server answers again: %s", error)


def _limits(events: KvEventSource | None) -> str:
    """Returns what this form of a worker cannot do."""
    limits = [
        f"over HTTP: {', '.join(REFUSED)} are refused",
        "seeded draws are vLLM's, seeded for each part of an answer",
        "priorities do not reach its scheduler",
        "requests of other clients are not counted",
    ]
    return "; ".join([*limits, "without --kv-events its cached prompts are unknown"] if events is None else limits)


async def _answers(server: VllmServer, lifecycle: Lifecycle) -> bool:
    """Waits until the server answers and returns True, or False if the process is to stop."""
    lifecycle.progress(f"waiting for {server.url}")
    level = logging.INFO
    while not lifecycle.stopping.is_set():
        try:
            await server.get("/health")
            return True
        except PeerLost as error:
            log.log(level, "waiting for the server: %s", error)
            level = logging.DEBUG
        await wait_event(lifecycle.stopping, HEALTH_INTERVAL_S)
    return False


async def _engine(config: AttachedConfig, server: VllmServer, events: KvEventSource | None) -> AttachedEngine:
    models = await server.get("/v1/models")
    try:
        card = json.loads(models)["data"][0]
        name, model = card["id"], config.model or card["root"]
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{server.url}/v1/models is not of a vLLM server: {models[:200]}") from error
    metrics = await server.get("/metrics")
    facts = facts_of(card, metrics, model, model_config(model), config.max_num_seqs)
    engine = AttachedEngine(server, name, facts, events)
    update_figures(engine.figures, metrics)
    return engine
