"""Endpoints for operators: liveness, readiness, metrics, version, state of the cluster; the pages for browsers."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from moonserve.gateway.access.rate_limit_service import admission_of
from moonserve.gateway.cluster.history import History
from moonserve.gateway.cluster.metrics_page import ClusterMetrics
from moonserve.gateway.config import GatewayConfig
from moonserve.gateway.errors import ApiError
from moonserve.gateway.generation.request_state import MAX_ATTEMPTS, attempt_id, choice_id
from moonserve.gateway.generation.service import Gateway
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.errors import NoWorker
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.metrics import package_version
from moonserve.protocol.rpc.wire import role_from_wire

_BODY_ID = re.compile("^(?:(?:chat)?cmpl-|resp_)")

ExplainCall = Callable[[str], Awaitable[conductor_pb2.ExplainReply]]

_CHAT, _DASHBOARD, _ASSETS = (Path(__file__).with_name(name) for name in ("chat.html", "dashboard.html", "assets"))


class OperatorEndpoints:
    """Handlers that do not concern the model."""

    def __init__(
        self,
        gateway: Gateway,
        registry: CollectorRegistry,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        cluster_metrics: ClusterMetrics,
        history: History,
    ) -> None:
        self._gateway = gateway
        self._cluster_metrics = cluster_metrics
        self._registry = registry
        self._config = config
        self._tokenizer = tokenizer
        self._history = history
        self._assets = StaticFiles(directory=_ASSETS)
        self._chat, self._dashboard = (page.read_text(encoding="utf-8") for page in (_CHAT, _DASHBOARD))

    async def health(self, request: Request) -> Response:
        """GET /health: the process is alive."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: a request would be served; 503 while draining or without workers."""
        if self._gateway.is_draining:
            raise NoWorker("this gateway is shutting down")
        if not self._gateway.is_ready:
            raise NoWorker("the cluster has no prefill or no decode worker")
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: metrics of this gateway in Prometheus' text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def cluster_metrics(self, request: Request) -> Response:
        """GET /metrics/cluster: metrics of all processes, each sample with the label `process`."""
        return Response(await self._cluster_metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return JSONResponse({"version": package_version()})

    async def cluster(self, request: Request) -> Response:
        """GET /v1/cluster: state of all instances, normally at most a second old."""
        view = self._gateway.cluster.view
        if view is None:
            raise NoWorker("the conductor does not answer")
        layout = MessageToDict(view.layout, preserving_proto_field_name=True) if view.HasField("layout") else None
        return JSONResponse(
            {
                "ready": self._gateway.is_ready,
                "models": self._config.names,
                "fingerprint": view.fingerprint,
                "max_model_len": view.max_model_len,
                "layout": layout,
                "requests": self._gateway.num_live + self._gateway.num_live_elsewhere,
                "at": time.time(),
                "gateway": self._config.instance_id,
                "gateways": [gateway.instance_id for gateway in view.gateways],
                "events": list(self._gateway.events.latest),
                "instances": [_instance(i) for i in sorted(view.instances, key=_sort_key)],
            }
        )

    async def figures(self, request: Request) -> Response:
        """GET /v1/figures: figures of the last minute at this gateway, and every instance's rails. Prefixes and
        requests are included only for keys without a tenant, which may see all tenants. Prefixes have their text only
        for such keys: without keys, everybody who reaches the gateway would read the prompts of the others."""
        gateway, now = self._gateway, asyncio.get_running_loop().time()
        view = gateway.cluster.view
        figures = gateway.figures.as_json(now)
        figures["slo"] = {
            "ttft_s": view.ttft_slo_s if view is not None else None,
            "tbt_s": view.tbt_slo_s if view is not None else None,
        }
        figures["phases"] = dict(gateway.phases())
        figures["rails"] = await self._cluster_metrics.rails()
        figures["flows"] = [(*pair, tokens) for pair, tokens in gateway.figures.flows.items()]
        identity = admission_of(request).identity
        if not identity.tenant:
            text_of = self._tokenizer.decode if identity.key_id else None
            figures["prefixes"] = gateway.figures.hot_prefixes(now, text_of)
            figures["latest"] = gateway.figures.latest_requests()
        return JSONResponse(figures)

    async def history(self, request: Request) -> Response:
        """GET /v1/history?after=NUMBER: points of the last hour at this gateway behind a number, or all of them."""
        after = request.query_params.get("after", "")
        known = self._history.as_json(int(after) if after.isdecimal() and len(after) < 16 else 0)
        return JSONResponse({"gateway": self._config.instance_id, **known})

    async def steps(self, request: Request) -> Response:
        """GET /v1/instances/{instance_id}/steps: the latest steps of a worker's engine, oldest first."""
        instance_id = request.path_params["instance_id"]
        found = await self._gateway.cluster.steps(instance_id)
        if found is None:
            raise ApiError(404, f"the cluster has no worker {instance_id!r}", code="not_found")
        return JSONResponse({"instance_id": instance_id, "steps": list(map(_numbers, found.steps))})

    async def explain(self, request: Request) -> Response:
        """GET /v1/requests/{request_id}/explain: why a request was placed where it was, and what happened then. Times
        of its choices are those that this gateway measured, of choices that ended here lately."""
        known_id, ask = request.path_params["request_id"], self._gateway.cluster.explain
        request_id, decisions, last = await explain(known_id, ask)
        # Ids are not secret, since clients choose them. A key without a tenant belongs to an operator and sees all.
        if tenant := admission_of(request).identity.tenant:
            decisions = [each for each in decisions if each["turn"]["tenant"] == tenant]
        if not decisions:
            raise ApiError(404, _not_remembered(known_id, last), code="not_found")
        known = self._gateway.figures.timings
        # Attempts of a choice share its id up to the tilde, which no id of a client has.
        choices = dict.fromkeys(each["request_id"].partition("~")[0] for each in decisions)
        timings = {choice: known[choice] for choice in choices if choice in known}
        return JSONResponse({"request_id": request_id, "decisions": decisions, "timings": timings})

    async def chat(self, request: Request) -> Response:
        """GET /: page for a conversation with the model."""
        return HTMLResponse(self._chat)

    async def dashboard(self, request: Request) -> Response:
        """GET /dashboard: page with the cluster's state."""
        return HTMLResponse(self._dashboard)

    async def asset(self, request: Request) -> Response:
        """GET /assets/{name}: a script, style or licence of the pages. Files of a library have its version in their
        name and never change; of others the browser asks whether they did."""
        name = request.path_params["name"]
        response = await self._assets.get_response(name, request.scope)
        is_fixed = name.startswith("uplot-")
        response.headers["cache-control"] = "public, max-age=31536000, immutable" if is_fixed else "no-cache"
        return response


# Explanations of placements


async def explain(known_id: str, ask: ExplainCall) -> tuple[str, list[dict[str, Any]], conductor_pb2.ExplainReply]:
    """Returns the conductor's records of all placements of a request.

    `known_id` is an id that a client knows from a header or a body. Returns the id in the cluster, decisions
    (conductor.placement.decision.Decision as JSON) by choice and attempt, and the conductor's last reply. Raises
    whatever `ask` raises.

    Clients choose names of requests and may reuse them; the id in the cluster is then another one. The conductor
    receives the name with the first placement, so every gateway can explain requests of the others. Ids are requested
    one after the other: most requests have one choice and one attempt.
    """
    for name in dict.fromkeys((known_id, _BODY_ID.sub("", known_id))):
        named = await ask(name)
        request_id = json.loads(named.decision_json)["request_id"] if named.found else name
        decisions, last = await _decisions(request_id, ask)
        if decisions:
            break
    return request_id, decisions, last


async def _decisions(request_id: str, ask: ExplainCall) -> tuple[list[dict[str, Any]], conductor_pb2.ExplainReply]:
    """Returns the decisions about all attempts of all choices, up to the first unknown choice, and the last reply. A
    choice's first attempts may be forgotten, or may have been made by an earlier leader."""
    decisions: list[dict[str, Any]] = []
    # The current attempt, and whether an attempt of its choice was found.
    index, attempt, is_known = 0, 1, False
    while True:
        reply = await ask(attempt_id(choice_id(request_id, index), attempt))
        if reply.found:
            decisions.append(json.loads(reply.decision_json))
            attempt, is_known = attempt + 1, True
        elif attempt < MAX_ATTEMPTS:
            attempt += 1
        elif is_known:
            index, attempt, is_known = index + 1, 1, False
        else:
            return decisions, reply


def _not_remembered(known_id: str, last: conductor_pb2.ExplainReply) -> str:
    return (
        f"the conductor has no decision about {known_id!r}; it keeps those of the last"
        f" {last.max_decisions} requests and has {last.num_decisions} now: use the id of the reply's"
        " body or its header x-request-id, ask sooner, or start the conductor with a larger --num-decisions"
    )


def _sort_key(instance: conductor_pb2.InstanceView) -> tuple[int, int, str]:
    """Returns the sort key of an instance; the order of joining would change with every restart."""
    instance_id = instance.endpoint.instance_id
    return instance.role, len(instance_id), instance_id


def _instance(instance: conductor_pb2.InstanceView) -> dict[str, Any]:
    return {
        "instance_id": instance.endpoint.instance_id,
        "role": role_from_wire(instance.role).value,
        "rpc_address": instance.endpoint.rpc_address,
        "host": instance.endpoint.host,
        "epoch": instance.endpoint.epoch,
        "draining": instance.draining,
        "last_heard_s": instance.last_heard_s,
        "num_blocks": instance.num_blocks,
        "indexed_blocks": instance.indexed_blocks,
        "can_switch_role": instance.can_switch_role,
        "load": {
            **{name: getattr(instance.load, name) for name in _LOAD_NUMBERS},
            "traffic": list(map(_numbers, instance.load.traffic)),
            "steps": _numbers(instance.load.steps),
        },
    }


def _numbers(message: Any) -> dict[str, Any]:
    """Returns the fields of a flat message. Unlike `MessageToDict` it does not turn large integers into strings."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


_LOAD_NUMBERS = [field.name for field in conductor_pb2.Load.DESCRIPTOR.fields if field.message_type is None]
