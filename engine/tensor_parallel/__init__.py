"""Ranks of one worker share every layer (Megatron-LM): an engine's view of the other ranks. Sums: collectives.py; steps
to ranks: step_messages.py; their processes: rank_processes.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from moonserve.engine.kernels import Step
from moonserve.engine.model.partition import Shard
from moonserve.engine.tensor_parallel.collectives import Collectives

OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """One rank's share of the model and its access to the other ranks (Megatron-LM, arXiv:1909.08053 §3).

    Each rank is a process with its share of the weights. All ranks map the worker's one KV pool and each writes its own
    KV heads, so a block's bytes do not depend on the number of ranks. Rank 0 is the worker that the cluster knows: it
    schedules, transfers and samples, and sends each step to the other ranks."""

    shard: Shard
    collectives: Collectives
    vocab_size: int

    def gather_logits(self, own: torch.Tensor) -> torch.Tensor:
        """Implements `engine.model.forward_pass.LogitsGather.gather_logits`."""
        if not len(own):
            return own.new_empty(0, self.vocab_size)  # no slice samples
        width = -(-self.vocab_size // self.shard.size)
        parts = self.collectives.gather(F.pad(own, (0, width - own.shape[1])).contiguous())
        return torch.cat(parts, dim=1)[:, : self.vocab_size] if parts else own


class FollowerRanks(Protocol):
    """The ranks that follow rank 0."""

    def send(self, step: Step, dirty: torch.Tensor | None) -> None:
        """Sends the step that all ranks compute next. Raises PeerLost."""

    def abort(self, error: BaseException) -> None:
        """Ends the other ranks after `error`, since their state is unknown. Callable from any thread."""


class StepLeader:
    """Runs steps at rank 0. Rule: a step that was sent runs to its end, or all ranks end."""

    def __init__(self, others: FollowerRanks) -> None:
        self._others = others

    def run(
        self,
        compute: Callable[[Step, torch.Tensor | None, OnLayer | None], torch.Tensor],
        step: Step,
        dirty: torch.Tensor | None,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """Runs `compute` at all ranks. An exception of `on_layer` is raised after the step has ended."""
        failures: list[Exception] = []

        def guarded(layer: int) -> None:
            if on_layer is not None and not failures:
                try:
                    on_layer(layer)
                except Exception as error:  # the caller's error; raised once the step has ended
                    failures.append(error)

        try:
            self._others.send(step, dirty)
            output = compute(step, dirty, None if on_layer is None else guarded)
        except BaseException as error:
            self._others.abort(error)
            raise
        if failures:
            raise failures[0]
        return output
