"""RDMA devices through pyverbs: the `Fabric` of this host, and the only importer of pyverbs.

Works around limits of pyverbs. Version 44 does not expose a completion channel's descriptor. Work requests and their
scatter entries leak 16 bytes each unless closed, so they are made once and reused. `get_cq_event` blocks with the GIL
held, so it is called on a non-blocking descriptor only. No pyverbs call releases the GIL. All calls made here are
short, except registering gigabytes and, on rxe, posting (it sends in the caller's thread) and destroying a pair whose
packets the network interface still holds. The enumerations are in `pyverbs.enums` in 44 (Debian 12) and in
`pyverbs.libibverbs_enums` in 59 (PyPI).
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from moonserve.protocol.errors import ConfigError, InvalidRequest, MoonserveError, PeerLost
from moonserve.transfer.rdma.device import (
    CHAIN,
    Completion,
    Limits,
    PairAddress,
    Port,
    Region,
    Runs,
    discover_ports,
)

_Made = TypeVar("_Made")

_INLINE_BYTES = 64
"""Requested inline size; the device's answer counts."""
_HOP_LIMIT = 64
_ACK_TIMEOUT = 16
"""4.096 µs · 2^16 = 0.27 s until a packet is sent again. Hardware may take up to four times as long."""
_RETRIES = 6
"""Together with the timeout, a silent peer costs 2 s. 7 would mean forever on rxe."""
_RNR_TIMER = 12
"""0.64 ms. Receives are posted before the peer is allowed to write, so this only covers reordering."""
_CHANNEL_LINK = "anon_inode:[infinibandevent]"
_channels = threading.Lock()


INSTALL = "install Debian's python3-pyverbs and ibverbs-providers, or `pip install moonserve[rdma]`"


@cache
def pyverbs() -> SimpleNamespace:
    """Imports the parts of pyverbs that are used here. Raises ConfigError."""
    try:
        with root_logger_untouched():
            names = ("addr", "cq", "device", "mr", "pd", "pyverbs_error", "qp", "wr")
            parts = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
            try:
                enums = importlib.import_module("pyverbs.libibverbs_enums")
            except ImportError:
                enums = importlib.import_module("pyverbs.enums")
            return SimpleNamespace(enums=enums, **parts)
    except ImportError as error:
        raise ConfigError(f"rdma needs pyverbs ({error}): {INSTALL}") from error


@contextmanager
def root_logger_untouched() -> Iterator[None]:
    """Restores the root logger, which importing pyverbs configures."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


class VerbsFabric:
    """A `Fabric` over pyverbs."""

    def ports(self) -> list[Port]:
        pyverbs()
        return discover_ports()

    def open(self, port: Port) -> VerbsDevice:
        return VerbsDevice(port)


class VerbsDevice:
    """An `RdmaDevice`: a device context and a protection domain."""

    def __init__(self, port: Port) -> None:
        pv = pyverbs()
        self.port = port
        try:
            self._context = pv.device.Context(name=port.device)
            self._domain = pv.pd.PD(self._context)
            device = self._context.query_device()
            attributes = self._context.query_port(port.number)
        except pv.pyverbs_error.PyverbsError as error:
            raise ConfigError(f"rdma: cannot open {port.name}: {error}; {INSTALL}") from error
        self.lid = int(attributes.lid)
        self.limits = Limits(
            max_message_bytes=int(attributes.max_msg_sz),
            max_send_requests=int(device.max_qp_wr),
            max_outstanding_reads=min(device.max_qp_rd_atom, device.max_qp_init_rd_atom, 255),
            path_mtu=int(attributes.active_mtu),
        )

    def register(self, address: int, nbytes: int, *, remote_read: bool, remote_write: bool) -> Region:
        enums = pyverbs().enums
        access = enums.IBV_ACCESS_LOCAL_WRITE
        access |= enums.IBV_ACCESS_REMOTE_READ if remote_read else 0
        access |= enums.IBV_ACCESS_REMOTE_WRITE if remote_write else 0
        make = pyverbs().mr.MR
        hint = f"{self.port.name} cannot register {nbytes} bytes (ulimit -l, or memory of a file?)"
        region: Any = _call_verbs(
            lambda: make(self._domain, nbytes, int(access), address=address), hint, InvalidRequest
        )
        keys = {"local_key": int(region.lkey), "remote_key": int(region.rkey)}
        return cast("Region", SimpleNamespace(**keys, close=region.close))

    def make_completion_queue(self, capacity: int) -> VerbsCompletionQueue:
        return _call_verbs(lambda: VerbsCompletionQueue(self._context, capacity), "cannot create a completion queue")

    def make_queue_pair(self, completions: Any, *, send_depth: int, receive_depth: int, serves: bool) -> VerbsQueuePair:
        def make(max_inline_bytes: int) -> VerbsQueuePair:
            cap = pyverbs().qp.QPCap(
                max_send_wr=send_depth,
                max_recv_wr=receive_depth,
                max_inline_data=max_inline_bytes,
            )
            return VerbsQueuePair(self._domain, self.port, completions.queue, cap, serves)

        try:
            return make(_INLINE_BYTES)
        except pyverbs().pyverbs_error.PyverbsError:
            return _call_verbs(lambda: make(0), "cannot create a queue pair")

    def close(self) -> None:
        self._domain.close()
        self._context.close()


class VerbsCompletionQueue:
    """A `CompletionQueue` with its own channel, so that every event on the channel belongs to it."""

    def __init__(self, context: Any, capacity: int) -> None:
        self._channel, self.descriptor = _make_channel(context)
        if self.descriptor is not None:
            os.set_blocking(self.descriptor, False)
        self.queue = pyverbs().cq.CQ(context, capacity, None, self._channel, 0)
        self._error = pyverbs().pyverbs_error.PyverbsError

    def poll(self, limit: int) -> list[Completion]:
        count, completions = self.queue.poll(limit)
        return [_completion(each) for each in completions] if count else []

    def arm(self) -> None:
        self.queue.req_notify()

    def acknowledge(self) -> None:
        try:
            self._channel.get_cq_event(self.queue)
        except self._error:  # EAGAIN: no event
            return
        self.queue.ack_events(1)

    def close(self) -> None:
        self.queue.close()
        self._channel.close()


class VerbsQueuePair:
    """A `QueuePair` over pyverbs."""

    def __init__(self, domain: Any, port: Port, completions: Any, cap: Any, serves: bool) -> None:
        pv = pyverbs()
        init = pv.qp.QPInitAttr(qp_type=pv.enums.IBV_QPT_RC, scq=completions, rcq=completions, cap=cap, sq_sig_all=0)
        self._pair = pv.qp.QP(domain, init)
        self._port = port
        self._serves = serves
        self._closing = threading.Lock()
        self._closed = False
        self._requests = _Requests()
        self._receive = _empty_receive()
        self.number = int(self._pair.qp_num)
        self.first_packet = secrets.randbits(24)
        self.max_inline_bytes = int(init.max_inline_data)
        self._requests.max_inline_bytes = self.max_inline_bytes

    def connect(self, peer: PairAddress) -> None:
        attributes = self._attributes(peer)
        _call_verbs(lambda: self._pair.to_rts(attributes), "cannot connect a queue pair")

    def _attributes(self, peer: PairAddress) -> Any:
        enums, qp = pyverbs().enums, pyverbs().qp
        access = enums.IBV_ACCESS_REMOTE_READ | enums.IBV_ACCESS_REMOTE_WRITE
        attributes = qp.QPAttr(port_num=self._port.number, path_mtu=peer.path_mtu)
        attributes.qp_access_flags = int(access) if self._serves else 0
        attributes.dest_qp_num = peer.number
        attributes.rq_psn = peer.first_packet
        attributes.sq_psn = self.first_packet
        attributes.max_rd_atomic = peer.max_outstanding_reads
        attributes.max_dest_rd_atomic = peer.max_outstanding_reads
        attributes.min_rnr_timer = _RNR_TIMER
        attributes.timeout = _ACK_TIMEOUT
        attributes.retry_cnt = _RETRIES
        attributes.rnr_retry = _RETRIES
        attributes.ah_attr = _route(self._port, peer)
        return attributes

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> None:
        head = self._requests.read(token, runs, local_key, remote_key)
        _call_verbs(lambda: self._pair.post_send(head), "cannot post a request")

    def write(
        self,
        token: int,
        runs: Runs,
        local_key: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        head = self._requests.write(token, runs, local_key, remote_key, immediate)
        _call_verbs(lambda: self._pair.post_send(head), "cannot post a request")

    def receive(self, token: int) -> None:
        self._receive.wr_id = token
        _call_verbs(lambda: self._pair.post_recv(self._receive), "cannot post a receive")

    def fail(self) -> None:
        qp, enums = pyverbs().qp, pyverbs().enums
        with self._closing:
            if not self._closed:
                attributes = qp.QPAttr(qp_state=enums.IBV_QPS_ERR)
                _call_verbs(lambda: self._pair.modify(attributes, int(enums.IBV_QP_STATE)), "cannot stop a queue pair")

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._pair.close()
        self._requests.close()
        self._receive.close()


class _Requests:
    """A chain of work requests that is filled and posted repeatedly.

    pyverbs can link requests but not unlink them, so a shorter chain is the tail of this one.
    """

    def __init__(self) -> None:
        pv = pyverbs()
        self._entries = [pv.wr.SGE(0, 0, 0) for _ in range(CHAIN)]
        self._requests = [self._make(entry) for entry in self._entries]
        for request, following in zip(self._requests, self._requests[1:], strict=False):
            request.next_wr = following
        self._read = int(pv.enums.IBV_WR_RDMA_READ)
        self._write = int(pv.enums.IBV_WR_RDMA_WRITE)
        self._write_with_immediate = int(pv.enums.IBV_WR_RDMA_WRITE_WITH_IMM)
        self._signaled = int(pv.enums.IBV_SEND_SIGNALED)
        self._inline = int(pv.enums.IBV_SEND_INLINE)
        self.max_inline_bytes = 0

    @staticmethod
    def _make(entry: Any) -> Any:
        request = pyverbs().wr.SendWR(num_sge=1, sg=[entry])
        request.close()  # frees its copy of the entry; from here on it points to the entry itself
        request.sg_list = entry
        return request

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> Any:
        return self._fill(token, self._read, runs, local_key, remote_key)

    def write(
        self,
        token: int,
        runs: Runs,
        local_key: int,
        remote_key: int,
        immediate: int | None,
    ) -> Any:
        head = self._fill(token, self._write, runs, local_key, remote_key)
        last = self._requests[-1]
        if immediate is not None:
            last.opcode = self._write_with_immediate
            last.imm_data = socket.htonl(immediate)
        requests = self._requests[CHAIN - len(runs) :] if self.max_inline_bytes else []
        for request, (_, _, nbytes) in zip(requests, runs, strict=False):
            if nbytes <= self.max_inline_bytes:
                request.send_flags |= self._inline
        return head

    def _fill(self, token: int, opcode: int, runs: Runs, local_key: int, remote_key: int) -> Any:
        first = CHAIN - len(runs)
        entries, requests = self._entries[first:], self._requests[first:]
        for entry, request, (remote, local, nbytes) in zip(entries, requests, runs, strict=True):
            entry.addr, entry.length, entry.lkey = local, nbytes, local_key
            request.opcode, request.send_flags = opcode, 0
            request.num_sge = 1 if nbytes else 0
            request.set_wr_rdma(remote_key, remote)
        requests[-1].wr_id = token
        requests[-1].send_flags = self._signaled
        return requests[0]

    def close(self) -> None:
        for entry in self._entries:
            entry.close()
        self._entries, self._requests = [], []


def _empty_receive() -> Any:
    """Creates a receive for an immediate value alone. pyverbs 44 requires an entry but can drop it afterwards."""
    wr = pyverbs().wr
    entry = wr.SGE(0, 0, 0)
    receive = wr.RecvWR(num_sge=1, sg=[entry])
    entry.close()
    receive.num_sge = 0
    return receive


def _completion(entry: Any) -> Completion:
    enums = pyverbs().enums
    if entry.status:
        return Completion(entry.wr_id, _status_name(entry.status), None)
    if entry.opcode == enums.IBV_WC_RECV_RDMA_WITH_IMM:
        return Completion(entry.wr_id, None, socket.ntohl(entry.imm_data))
    return Completion(entry.wr_id, None, None)


def _status_name(status: int) -> str:
    try:
        name: str = pyverbs().enums.ibv_wc_status(status).name
    except ValueError:
        return f"status {status}"
    return name.removeprefix("IBV_WC_").removesuffix("_ERR").lower().replace("_", " ")


def _route(port: Port, peer: PairAddress) -> Any:
    addr = pyverbs().addr
    assert port.gid is not None
    gid = addr.GID(":".join(peer.gid[i : i + 2].hex() for i in range(0, 16, 2)))
    route = addr.GlobalRoute(dgid=gid, sgid_index=port.gid.index, hop_limit=_HOP_LIMIT)
    return addr.AHAttr(gr=route, is_global=int(port.is_ethernet), port_num=port.number, dlid=peer.lid)


def _call_verbs(make: Callable[[], _Made], failure: str, kind: type[MoonserveError] = PeerLost) -> _Made:
    """Calls `make` and converts the device's refusal to an error of the tree."""
    try:
        return make()
    except pyverbs().pyverbs_error.PyverbsError as error:
        raise kind(f"rdma: {failure}: {error}") from error


def _make_channel(context: Any) -> tuple[Any, int | None]:
    """Creates a completion channel and finds its descriptor, None if that fails 8 times. pyverbs 44 does not expose it:
    it is the one that appeared. Another thread's may appear at the same time, so only a single new one counts."""
    make = pyverbs().cq.CompChannel
    with _channels:
        for _ in range(8):
            before = _channel_descriptors()
            channel = make(context)
            if hasattr(channel, "fd"):
                return channel, int(channel.fd)
            new = _channel_descriptors() - before
            if len(new) == 1:
                return channel, new.pop()
            channel.close()
        return make(context), None


def _channel_descriptors() -> set[int]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(path) == _CHANNEL_LINK:
                found.add(int(path.name))
        except OSError:  # closed by another thread
            continue
    return found
