"""Builds the machines that a spec asks for, new ones and those that take a dead one's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from traces.simulator.decode import DecodeMachine
from traces.simulator.machines import DecodeNode, Node, PrefillNode
from traces.simulator.pool import Store
from traces.simulator.prefill import PrefillMachine, Prompt
from traces.simulator.spec import ClusterSpec


class Workshop:
    """A group that prefills together (CPP) has the memory and the links of all its machines."""

    def __init__(self, spec: ClusterSpec, cached_now: Callable[[Prompt], int]) -> None:
        """`cached_now`: see `PrefillMachine`."""
        self._spec = spec
        self._cached_now = cached_now

    def prefill_node(self, index: int) -> PrefillNode:
        return PrefillNode(
            name=f"prefill-{index}", machine=self.prefill_machine(), store=self.store()
        )

    def prefill_machine(self) -> PrefillMachine:
        spec = self._spec
        return PrefillMachine(
            spec.model.prefill,
            chunk_tokens=spec.chunk_tokens,
            num_stages=spec.prefill_group,
            cached_now=self._cached_now,
        )

    def store(self) -> Store:
        """Raises ConfigError for an unknown eviction policy."""
        spec = self._spec
        tokens = spec.model.dram_tokens * spec.prefill_group
        disk_tokens = spec.model.disk_tokens * spec.prefill_group
        return Store(tokens // spec.block_size, disk_tokens // spec.block_size, spec.eviction)

    def decode_node(self, index: int) -> DecodeNode:
        return DecodeNode(name=f"decode-{index}", machine=self.decode_machine())

    def decode_machine(self) -> DecodeMachine:
        spec = self._spec
        return DecodeMachine(spec.model, spec.block_size, spec.chunk_tokens)

    def links(self, nodes: Iterable[Node]) -> dict[str, float]:
        """Bytes per second of every link: in and out, memory to devices, disk."""
        model = self._spec.model
        rates = {
            "out": model.nic_bytes_per_s,
            "in": model.nic_bytes_per_s,
            "device": model.device_bytes_per_s,
            "disk": model.disk_bytes_per_s,
        }
        return {
            f"{node.name}/{link}": rate * self._num_machines(node)
            for node in nodes
            for link, rate in rates.items()
        }

    def _num_machines(self, node: Node) -> int:
        return self._spec.prefill_group if isinstance(node, PrefillNode) else 1
