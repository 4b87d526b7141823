"""From URLs to addresses."""

from __future__ import annotations

import pytest

from kvstore.client.connecting import default_options
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:7000",
        "node://127.0.0.1:7000",
        "redis://:secret@127.0.0.1:6379/0",
        "redis+sentinel://user:secret@127.0.0.1:26379,127.0.0.2:26379/main/0",
        "nowhere.invalid:7000",  # nobody knows the way: loopback
    ],
)
def test_transfers_leave_by_the_address_that_leads_to_the_registry(url: str) -> None:
    assert default_options(url).host == "127.0.0.1"


@pytest.mark.parametrize("url", ["node://127.0.0.1:port", "127.0.0.1:99999", "redis://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        default_options(url)
