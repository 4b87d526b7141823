"""What cannot be right is told before anything is sent, per transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocol.errors import InvalidRequest
from tests.patience import PATIENCE_S
from tests.transfer.conftest import Pair
from transfer import Op, RemoteSegment, ScatterTransfer


@pytest.fixture
def transport() -> str:
    return "tcp"


def test_ids_that_fit_no_frame_are_the_callers_error(pair: Pair) -> None:
    read, write = pair.read(0, 0, 10), pair.write(0, 0, 10)
    for segment_id in (-1, 1 << 64):
        unsound = replace(read, remote=RemoteSegment(pair.far.address, segment_id))
        batch = pair.near.submit([unsound, read], deadline_s=PATIENCE_S)
        with pytest.raises(InvalidRequest):
            batch.wait(PATIENCE_S)
        assert batch.errors[1] is None
        with pytest.raises(InvalidRequest):
            pair.near.run([unsound], deadline_s=PATIENCE_S)
    with pytest.raises(InvalidRequest):
        pair.near.run([replace(write, window_id=-1)], deadline_s=PATIENCE_S)
    pair.run(read)


@pytest.mark.parametrize(
    "rows", ["abc", [["x", "y", "z"]], [[1 << 70, 0, 1]], np.zeros((2, 2), np.int64), None]
)
def test_rows_that_are_none_are_the_callers_error(pair: Pair, rows: Any) -> None:
    transfer = ScatterTransfer(Op.READ, pair.local, pair.remote, rows)
    batch = pair.near.submit([transfer, pair.read(0, 0, 10)], deadline_s=PATIENCE_S)
    with pytest.raises(InvalidRequest):
        batch.wait(PATIENCE_S)
    assert batch.errors[1] is None
    assert not pair.local.num_users
