"""Options of the directory that cannot be."""

from __future__ import annotations

import pytest

from kvstore.directory.config import DirectoryConfig
from protocol.config import load
from protocol.errors import ConfigError

ENVIRON = {"MOONSERVE_CLUSTER_TOKEN": "token"}


@pytest.mark.parametrize(
    ("registry", "is_own"),
    [
        ("127.0.0.1:7100", True),
        ("localhost:7100", True),
        ("moonserve://127.0.0.1:7100", True),
        ("redis://127.0.0.1:7100", False),
        ("127.0.0.1:7101", False),
        ("10.0.0.1:7100", False),
    ],
)
def test_a_directory_is_not_told_to_follow_itself(registry: str, is_own: bool) -> None:
    """Which the variable that kvctl reads would do, in the shell that a directory is started from."""
    own = ("--instance-id", "directory", "--port", "7100")
    environ = {**ENVIRON, "MOONSERVE_REGISTRY": registry}
    if is_own:
        with pytest.raises(ConfigError, match="MOONSERVE_REGISTRY"):
            load(DirectoryConfig, own, prog="directory", environ=environ)
    else:
        assert load(DirectoryConfig, own, prog="directory", environ=environ).registry == registry
