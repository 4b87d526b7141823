"""The only importer of pyverbs; hides where its versions keep things.

The enumerations are in `pyverbs.enums` in 44 (Debian 12) and in `pyverbs.libibverbs_enums` in 59 (PyPI).
Importing it configures the root logger, which is undone here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from protocol.errors import ConfigError

INSTALL = "install Debian's python3-pyverbs and ibverbs-providers, or `pip install moonserve[rdma]`"


@cache
def pyverbs() -> SimpleNamespace:
    """The parts of pyverbs that are used here. Raises ConfigError."""
    try:
        with root_logger_untouched():
            names = ("addr", "cq", "device", "mr", "pd", "pyverbs_error", "qp", "wr")
            parts = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
            return SimpleNamespace(enums=_enums(), **parts)
    except ImportError as error:
        raise ConfigError(f"rdma needs pyverbs ({error}): {INSTALL}") from error


def _enums() -> Any:
    try:
        return importlib.import_module("pyverbs.libibverbs_enums")
    except ImportError:
        return importlib.import_module("pyverbs.enums")


@contextmanager
def root_logger_untouched() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
