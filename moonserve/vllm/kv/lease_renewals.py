"""A decode server's side of hand-offs: connections to prefill servers' workers, and renewal of leases there."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import cast

import grpc

from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.pb import handoff_pb2, handoff_pb2_grpc
from moonserve.protocol.rpc.socket_client_sync import SyncChannel
from moonserve.vllm.kv.step_plan import Remote

log = logging.getLogger(__name__)

_CALL_S = 2.0


class HandoffChannels:
    """Connections to the workers of prefill servers. Thread-safe."""

    def __init__(self, cluster_token: str) -> None:
        self._token = cluster_token
        self._lock = threading.Lock()
        self._channels: dict[str, SyncChannel] = {}

    def to(self, address: str) -> handoff_pb2_grpc.KvHandoffStub:
        """Raises InvalidRequest for an address that is none."""
        with self._lock:
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = SyncChannel(address, self._token)
        return handoff_pb2_grpc.KvHandoffStub(cast(grpc.Channel, channel))  # SyncChannel implements what stubs use

    def release(self, request_id: str, addresses: Iterable[str]) -> None:
        """Tells workers that a request's KV is not needed. Where there is no answer, its lease ends."""
        request = handoff_pb2.ReleaseHandoffRequest(request_ids=[request_id])
        for address in addresses:
            try:
                self.to(address).Release(request, timeout=_CALL_S)
            except MoonserveError as error:
                log.info("request %s: not released at %s: %s", request_id, address, error)

    def renew(self, request_ids: Iterable[str], address: str) -> None:
        """Renews leases. A load whose lease has ended fails by itself."""
        try:
            request = handoff_pb2.RenewHandoffRequest(request_ids=request_ids)
            self.to(address).Renew(request, timeout=_CALL_S)
        except MoonserveError as error:
            log.info("leases are not renewed at %s: %s", address, error)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


class LeaseRenewals:
    """Renews the leases of waiting requests in a thread of its own. Thread-safe; `close` it."""

    def __init__(self, channels: HandoffChannels, every_s: float) -> None:
        self._channels = channels
        self._every_s = every_s
        self._lock = threading.Lock()
        self._waiting: dict[str, Remote] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moonserve leases", daemon=True)
        self._thread.start()

    def add(self, remote: Remote) -> None:
        with self._lock:
            self._waiting[remote.request_id] = remote

    def remove(self, remote: Remote) -> None:
        with self._lock:
            self._waiting.pop(remote.request_id, None)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            with self._lock:
                waiting = list(self._waiting.values())
            by_address: dict[str, list[str]] = defaultdict(list)
            for remote in waiting:
                for address in remote.addresses:
                    by_address[address].append(remote.request_id)
            for address, request_ids in by_address.items():
                self._channels.renew(request_ids, address)
