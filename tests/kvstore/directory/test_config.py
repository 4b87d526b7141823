"""Options of the directory that cannot be."""

from __future__ import annotations

import pytest

from kvstore.directory.config import DirectoryConfig
from protocol.config import load
from protocol.errors import ConfigError

OWN = ("--instance-id", "directory", "--port", "7100")
TOKEN = {"MOONSERVE_CLUSTER_TOKEN": "token"}
ITSELF = ("127.0.0.1:7100", "localhost:7100", "moonserve://127.0.0.1:7100")


@pytest.mark.parametrize("registry", ITSELF)
def test_a_directory_is_not_told_to_follow_itself(registry: str) -> None:
    """Which the variable that kvctl reads would do, in the shell that a directory is started from."""
    with pytest.raises(ConfigError, match="MOONSERVE_REGISTRY"):
        load(
            DirectoryConfig,
            OWN,
            prog="directory",
            environ={**TOKEN, "MOONSERVE_REGISTRY": registry},
        )


@pytest.mark.parametrize("registry", ["redis://127.0.0.1:7100", "127.0.0.1:7101", "10.0.0.1:7100"])
def test_another_registry_may_be_named(registry: str) -> None:
    config = load(DirectoryConfig, [*OWN, "--registry", registry], prog="directory", environ=TOKEN)
    assert config.registry == registry
