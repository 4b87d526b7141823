"""Sums and gathers over ranks, steps as messages, and the errors when a rank is lost or a step fails."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.engine.kernels import Span, Step
from moonserve.engine.tensor_parallel import OnLayer, StepLeader, step_messages
from moonserve.engine.tensor_parallel.collectives import Collectives
from moonserve.protocol.errors import PeerLost
from tests.engine.tensor_parallel.threaded_ranks import make_collectives
from tests.thoroughness import examples


@contextmanager
def team_of(size: int, timeout_s: float = 60.0) -> Iterator[list[Collectives]]:
    """Makes ranks of which rank 0 is connected to each other one."""
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, step_messages.pair())) for _ in range(1, size)]
        yield make_collectives(size, pairs, timeout_s)


def check(ranks: list[Collectives], rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Requires that two sums and a gather give all ranks the same bits, equal to a sum in rank order."""
    size = len(ranks)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    parts = torch.randn(2, size, rows, width, generator=generator).to(dtype)
    expected = hidden
    for own in parts:
        total = own[0].float()
        for other in own[1:]:
            total = total + other.float()
        expected = (expected.float() + total).to(dtype)
    found = [hidden.clone() for _ in ranks]

    def work(rank: int) -> list[torch.Tensor]:
        for own in parts:
            ranks[rank].all_reduce(found[rank], own[rank])
        return ranks[rank].gather(parts[0][rank].float().contiguous())

    with ThreadPoolExecutor(size) as pool:
        gathered = list(pool.map(work, range(size)))
    for each in found:
        assert torch.equal(each, expected)
    assert torch.equal(torch.stack(gathered[0]), parts[0].float())
    assert not any(gathered[1:])


@given(
    size=st.integers(1, 5),
    rows=st.integers(1, 20),
    width=st.sampled_from([1, 15, 16, 33, 5000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(30), deadline=None)
def test_sums_through_shared_memory_are_exact_and_equal(
    size: int, rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    """Covers parts that are larger than the space for one exchange."""
    with team_of(size) as ranks:
        check(ranks, rows, width, dtype, seed)


def test_waiting_for_a_dead_rank_raises() -> None:
    """The socket of a dead rank is closed, however the rank ended."""
    with team_of(2) as (first, second):
        hidden = torch.zeros(4)
        second._sockets[0].shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLost, match="has died"):
            first.all_reduce(hidden, torch.ones(4))


def test_waiting_for_a_late_rank_times_out() -> None:
    with team_of(2, timeout_s=0.05) as (first, _), pytest.raises(PeerLost, match="not arrived"):
        first.gather(torch.ones(4))


numbers = st.lists(st.integers(0, 2**40), max_size=20).map(lambda values: torch.tensor(values, dtype=torch.int64))


spans = st.builds(
    lambda start, length, blocks: Span(start, start + length, np.array(blocks, dtype=np.int64), start + length // 2),
    st.integers(0, 1000),
    st.integers(1, 1000),
    st.lists(st.integers(0, 1000), max_size=5),
)
some_steps = st.builds(
    lambda tokens, longest, spans, rows: Step(
        token_ids=tokens, positions=tokens + 1, longest=longest, slots=tokens + 2, spans=spans, rows=rows
    ),
    numbers,
    st.integers(1, 10_000),
    st.lists(spans, max_size=4),
    st.none() | numbers,
)


def plain(step: Step, dirty: torch.Tensor | None) -> list[object]:
    tensors = (step.token_ids, step.positions, step.slots, step.rows, dirty)
    spans = [(span.start, span.end, span.blocks.tolist(), span.prompt_end) for span in step.spans]
    return [*(None if each is None else each.tolist() for each in tensors), step.longest, spans]


@given(step=some_steps, dirty=st.none() | numbers)
@settings(max_examples=examples(50), deadline=None)
def test_step_message_round_trip(step: Step, dirty: torch.Tensor | None) -> None:
    """The message passes through a real socket."""
    own, other = step_messages.pair()
    with own, other:
        step_messages.send([own], step_messages.encode(step, dirty))
        message = step_messages.receive(other)
    found, found_dirty = step_messages.decode(message)
    assert plain(found, found_dirty) == plain(step, dirty)


def test_closed_socket_ends_the_receiver_and_fails_the_sender() -> None:
    own, other = step_messages.pair()
    with other:
        own.close()
        assert step_messages.receive(other) is None
    own, other = step_messages.pair()
    with own:
        other.close()
        with pytest.raises(PeerLost, match="does not receive steps"):
            step_messages.send([own], b"12345678")


def log() -> tuple[Any, list[str]]:
    """Returns `FollowerRanks` that only record calls, and the record."""
    said: list[str] = []
    told, given_up = (lambda *_: said.append("told")), (lambda error: said.append(f"given up: {type(error).__name__}"))
    return SimpleNamespace(send=told, abort=given_up), said


def step() -> Step:
    one = torch.tensor([1])
    return Step(token_ids=one, positions=one, longest=1, slots=one, spans=[], rows=None)


def test_error_of_a_layer_callback_is_raised_after_the_step() -> None:
    """If the error came earlier, the other ranks would wait in the middle of the step for ever."""
    (others, said), layers = log(), []

    def on_layer(layer: int) -> None:
        layers.append(layer)
        raise ValueError("the transfer engine is closed")

    def compute(_step: Step, _dirty: torch.Tensor | None, told: OnLayer | None) -> torch.Tensor:
        for layer in range(3):
            told(layer)
        said.append("computed")
        return torch.empty(0)

    with pytest.raises(ValueError, match="is closed"):
        StepLeader(others).run(compute, step(), None, on_layer)
    assert layers == [0]
    assert said == ["told", "computed"]


def test_failed_step_aborts_the_other_ranks() -> None:
    """The state of the other ranks is unknown then."""
    others, said = log()

    def compute(_step: Step, _dirty: torch.Tensor | None, _told: OnLayer | None) -> torch.Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        StepLeader(others).run(compute, step(), None, None)
    assert said == ["told", "given up: MemoryError"]
