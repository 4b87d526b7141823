"""What a user is told where pyverbs or a device is missing. The rest needs a device (tests/rdma)."""

from __future__ import annotations

import logging
import sys

import pytest

from protocol.errors import ConfigError
from transfer import TransferEngine, TransferOptions, registry
from transfer.rdma import verbs
from transfer.rdma.transport import RdmaTransport


def test_without_pyverbs_rdma_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setattr(registry, "_TRANSPORTS", {"rdma": RdmaTransport})
    verbs.pyverbs.cache_clear()  # a failure is not kept: the next test finds it again
    engine = TransferEngine(cluster_token="t", options=TransferOptions(transports=("rdma",)))
    with pytest.raises(ConfigError, match=r"python3-pyverbs.*moonserve\[rdma\]"):
        engine.start()


def test_the_root_logger_is_left_as_it_was() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    with verbs.root_logger_untouched():
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.DEBUG)
    assert (root.handlers, root.level) == before
