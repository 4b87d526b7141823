"""Host memory: what is unmapped is really gone from the process, by the kernel's own account."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from engine.elastic import cpu
from engine.elastic.base import MappingFailed
from engine.elastic.cpu import CpuBacking, CpuRange
from engine.elastic.resident import resident_bytes
from protocol.errors import ConfigError

SPAN = 4 * mmap.PAGESIZE
NBYTES = 64 * SPAN
OFFSETS = [0, 8 * SPAN, 63 * SPAN]
pytestmark = pytest.mark.parametrize("shared", [False, True], ids=["anonymous", "memfd"])


def reserve(shared: bool) -> CpuRange:
    return CpuBacking(frame_bytes=mmap.PAGESIZE, shared=shared).reserve(NBYTES)


def resident(memory: CpuRange) -> int:
    return resident_bytes(memory.address, memory.nbytes)


def test_a_reserved_range_costs_nothing_and_mapping_makes_just_its_spans_resident(
    shared: bool,
) -> None:
    memory = reserve(shared)
    assert resident(memory) == 0
    memory.map(OFFSETS, SPAN, ())
    assert resident(memory) == len(OFFSETS) * SPAN


def test_unmapping_lowers_resident_memory_and_leaves_other_spans_as_they_were(
    shared: bool,
) -> None:
    memory = reserve(shared)
    memory.map(OFFSETS, SPAN, ())
    view = np.frombuffer(memory.memory, dtype=np.uint8)
    for offset in OFFSETS:
        view[offset : offset + SPAN] = offset % 251 + 1
    memory.unmap(OFFSETS[1:2], SPAN, ())
    assert resident(memory) == (len(OFFSETS) - 1) * SPAN
    assert not view[OFFSETS[1] : OFFSETS[1] + SPAN].any()
    for offset in (OFFSETS[0], OFFSETS[2]):
        assert (view[offset : offset + SPAN] == offset % 251 + 1).all()


def test_what_is_mapped_again_is_zero(shared: bool) -> None:
    """Nobody sees what an earlier holder wrote."""
    memory = reserve(shared)
    view = np.frombuffer(memory.memory, dtype=np.uint8)
    for _ in range(3):
        memory.map(OFFSETS, SPAN, ())
        assert not view.any()
        for offset in OFFSETS:
            view[offset : offset + SPAN] = 255
        memory.unmap(OFFSETS, SPAN, ())
    assert resident(memory) in (
        0,
        NBYTES - len(OFFSETS) * SPAN,
    )  # reading a memfd's holes fills them


def test_closing_gives_everything_back_though_views_remain(shared: bool) -> None:
    memory = reserve(shared)
    view = np.frombuffer(memory.memory, dtype=np.uint8)
    memory.map(OFFSETS, SPAN, ())
    memory.close()
    assert resident(memory) == 0
    assert view[0] == 0


def test_a_page_that_the_kernel_refuses_leaves_nothing_behind(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = reserve(shared)
    populate, calls = cpu._populate, []

    def refusing(address: int, nbytes: int) -> None:
        calls.append(address)
        if len(calls) == len(OFFSETS):
            raise OSError(errno.ENOMEM, "no memory")
        populate(address, nbytes)

    monkeypatch.setattr(cpu, "_populate", refusing)
    with pytest.raises(MappingFailed, match="no memory"):
        memory.map(OFFSETS, SPAN, ())
    assert resident(memory) == 0


def test_a_kernel_without_populating_is_served_by_touching(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as Linux < 5.14 says
    memory = reserve(shared)
    memory.map(OFFSETS, SPAN, ())
    assert resident(memory) == len(OFFSETS) * SPAN


def test_what_lies_behind_the_range_cannot_be_touched(shared: bool) -> None:
    """An overrun ends the process instead of changing somebody's memory."""
    memory = reserve(shared)
    end = memory.address + memory.nbytes
    (guard,) = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) == end
    ]
    assert guard.split()[1].startswith("---")


def test_frames_are_whole_pages_of_the_kernel(shared: bool) -> None:
    with pytest.raises(ConfigError, match="not whole"):
        CpuBacking(frame_bytes=1000, shared=shared)


def test_more_addresses_than_there_are_cannot_be_reserved(shared: bool) -> None:
    with pytest.raises(ConfigError, match="cannot be reserved"):
        CpuBacking(shared=shared).reserve(1 << 62)
