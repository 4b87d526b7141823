"""Gateway process: builds all parts from the configuration, serves, and shuts down in order.

On a stop, `/ready` returns 503 at once and requests in flight get `drain_s`; remaining requests end in an error, and
only then the sockets close. If other gateways share the port, accepted connections are still served: no other process
could.
"""

import asyncio
import contextlib
import errno
import functools
import math
import resource
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from moonserve.gateway.access.key_file import KeyFile
from moonserve.gateway.access.key_table import KeyStore, KeyTable
from moonserve.gateway.access.rate_limit_service import RateLimiter
from moonserve.gateway.cluster.history import History, record
from moonserve.gateway.cluster.metrics_page import ClusterMetrics, phase_collector
from moonserve.gateway.cluster.request_metrics import RequestMetrics
from moonserve.gateway.config import ClientConfig, GatewayConfig
from moonserve.gateway.generation.request_timing import PHASES
from moonserve.gateway.generation.service import Gateway
from moonserve.gateway.http.connection import MAX_REFUSED, BoundedProtocol, ConnectionSet
from moonserve.gateway.http.operator_endpoints import OperatorEndpoints
from moonserve.gateway.http.routes import build_app, routes_of
from moonserve.gateway.openai.chat_completions import ChatCompletions
from moonserve.gateway.openai.messages_api import MessagesApi
from moonserve.gateway.openai.responses_api import ResponsesApi, ResponseStore
from moonserve.gateway.served_model import ServedModel
from moonserve.gateway.text.tokenizer import load_tokenizer
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.membership.conductor_client import parse_addresses
from moonserve.protocol.process.lifecycle import Lifecycle, infrequent_gc
from moonserve.protocol.process.metrics import add_metrics_service, process_registry
from moonserve.protocol.process.tracing import tracing
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer

_KEEP_ALIVE_S = 60
_BACKLOG = 2_048
_SPARE_FILES = 2 * MAX_REFUSED  # descriptors not used for clients that are served
# Time for which gateways that share a port wait for the cluster: workers load their weights first.
_JOIN_S = 600.0


async def serve(config: GatewayConfig, lifecycle: Lifecycle) -> None:
    """Runs the gateway until the lifecycle stops."""
    if config.conductor is None:
        raise ConfigError("--conductor HOST:PORT[,…] must be given")
    _allow_all_files()
    registry = process_registry()
    async with contextlib.AsyncExitStack() as closing:
        keys = open_keys(config, registry)
        closing.push_async_callback(keys.close)
        limiter = open_limits(config, registry)
        closing.push_async_callback(limiter.close)
        await keys.load()
        channels = await closing.enter_async_context(Channels(config.cluster_token, config.tls()))
        listener = closing.enter_context(_listener(config))
        lifecycle.progress("loading tokenizer")
        tokenizer = load_tokenizer(Path(config.model))
        tracer = closing.enter_context(tracing(config, config.instance_id, "gateway"))
        rpc_address = await _serve_metrics(config, registry, closing)
        metrics = RequestMetrics(registry, config.names[0], config.instance_id, PHASES)
        gateway = Gateway(config, channels, tokenizer, metrics, tracer, rpc_address)
        model = ServedModel(gateway, tokenizer, config)
        api = ChatCompletions(gateway, model, config)
        registry.register(phase_collector(gateway.phases))
        conductors = parse_addresses(config.conductor)
        cluster_metrics = ClusterMetrics(config.instance_id, registry, gateway.cluster, channels, conductors)
        history, cluster, rails = History(), gateway.cluster, cluster_metrics.rails
        responses = ResponsesApi(api, model, ResponseStore(config.response_store_bytes))
        operations = OperatorEndpoints(gateway, registry, config, tokenizer, cluster_metrics, history)
        routes = routes_of(api, model, responses, MessagesApi(api, model), operations)
        app = build_app(routes, keys, limiter, config.limits_for_all)
        closing.enter_context(infrequent_gc())
        recording = functools.partial(record, history, gateway.figures, gateway.phases, cluster, rails)
        background = (cluster.run, keys.run, limiter.run, recording)
        await _run(gateway, _server(app, config), listener, lifecycle, config, background)


def open_keys(config: ClientConfig, registry: CollectorRegistry) -> KeyTable:
    """Returns the holder of keys, without reading any. Imports redis only if it is used."""
    stores: list[KeyStore] = []
    if config.api_key_file is not None:
        stores.append(KeyFile(Path(config.api_key_file)))
    if config.api_keys_in_registry and config.redis_url is not None:
        from moonserve.gateway.access.redis_stores import RedisKeyStore

        stores.append(RedisKeyStore(config.redis_url))
    return KeyTable(config.fixed_keys(), stores, registry)


def open_limits(config: ClientConfig, registry: CollectorRegistry) -> RateLimiter:
    """Returns the limiter, shared with other gateways if there is a Redis."""
    if config.redis_url is None:
        return RateLimiter(None, registry)
    from moonserve.gateway.access.redis_stores import RedisRateLimits

    return RateLimiter(RedisRateLimits(config.redis_url), registry)


async def _serve_metrics(config: GatewayConfig, registry: CollectorRegistry, closing: contextlib.AsyncExitStack) -> str:
    """Starts a metrics server and returns its address. Gateways that share the port read each other's metrics, so that
    any of them can show all. Returns "" if the port is not shared."""
    if not config.reuse_port:
        return ""
    server = RpcServer(config.cluster_token, config.tls())
    add_metrics_service(server.grpc, config.instance_id, registry)
    return await closing.enter_async_context(server.serving("127.0.0.1", 0, 0))  # these gateways run on the same host


def _server(app: ASGIApp, config: GatewayConfig) -> "_Server":
    connections = ConnectionSet()
    # uvicorn's type demands a class, but uvicorn only calls it.
    protocol: Any = functools.partial(
        BoundedProtocol, client_config=config, max_connections=_max_connections(config), connection_set=connections
    )
    return _Server(
        connections,
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        ),
    )


def _max_connections(config: GatewayConfig) -> float:
    """Returns the limit of connections. Descriptors are reserved for refused connections, the cluster and files."""
    if config.max_connections is not None:
        return config.max_connections
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else max(1, limit - _SPARE_FILES)


def _allow_all_files() -> None:
    """Raises the soft limit of open files to the hard one. It is often 1,024, for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(
    gateway: Gateway,
    server: "_Server",
    listener: socket.socket,
    lifecycle: Lifecycle,
    config: GatewayConfig,
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]],
) -> None:
    """`background`: functions that run in the background until everything else has ended."""
    async with asyncio.TaskGroup() as tasks:
        await gateway.cluster.refresh()
        following = [tasks.create_task(each()) for each in background]
        if config.reuse_port:  # until then other gateways have the connections, if there are any
            await gateway.cluster.wait_ready(_JOIN_S)
            listener.listen(_BACKLOG)
        serving = tasks.create_task(server.serve(sockets=[listener]), name="http")
        host, port = listener.getsockname()[:2]
        lifecycle.ready(http=f"http://{host}:{port}")
        await lifecycle.stopping.wait()
        gateway.drain(refuses=not config.shares_port)
        if config.shares_port:
            await server.release_port(listener)
        await lifecycle.wait_until_drained(server.idle(), config.drain_s)
        await gateway.close()
        server.should_exit = True
        await serving
        for task in following:
            task.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers; the process has its own."""

    def __init__(self, connections: ConnectionSet, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def idle(self) -> None:
        """Waits until every request has its reply and, after `release_port`, until every connection has ended."""
        if self._connections.is_closing:
            await self._connections.is_empty.wait()
        while tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks)

    async def release_port(self, listener: socket.socket) -> None:
        """Leaves new connections to the other listeners on the port. Each existing connection ends with its next reply,
        or once silent, so that its client connects again."""
        self._connections.close()
        waiting = list(
            _pending_connections(listener)
        )  # the kernel resets waiting connections when their listener closes
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        for client in waiting:
            await loop.connect_accepted_socket(self._protocol, client)

    def _protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        made: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def _pending_connections(listener: socket.socket) -> Iterator[socket.socket]:
    """Yields connections that the kernel has established and that are not accepted yet."""
    with contextlib.suppress(OSError):  # mostly EAGAIN: there are no more
        while True:
            client, _ = listener.accept()
            client.setblocking(False)
            yield client


def _listener(config: GatewayConfig) -> socket.socket:
    """Returns the configured listening socket. Raises ConfigError."""
    if config.listen_fd is None:
        return bind(config.host, config.port, shared=config.reuse_port)
    try:
        listener = socket.socket(fileno=config.listen_fd)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"--listen-fd {config.listen_fd}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a listening socket. `shared`: processes of the same user may share the port, and the socket does not
    listen yet. Raises ConfigError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        if not shared:
            listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        hint = "the port is in use; choose another with --port" if taken else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {hint}") from error
    listener.setblocking(False)
    return listener
