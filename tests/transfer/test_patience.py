"""Large transfers may take longer than small ones."""

from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from transfer.patience import Patience


def test_time_grows_with_bytes_over_a_base() -> None:
    patience = Patience(base_s=2.0, slowest_bytes_s=1e6)
    assert patience.deadline_s(0) == 2.0
    assert patience.deadline_s(3_000_000) == 5.0


@pytest.mark.parametrize("wrong", [{"base_s": 0.0}, {"slowest_bytes_s": 0}])
def test_there_is_always_some_time_and_some_end(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Patience(**wrong)
