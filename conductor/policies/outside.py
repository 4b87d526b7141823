"""Loads users' own placement policies, named `FILE.py:CLASS` or `MODULE:CLASS`.

A name runs code, so it is accepted from the command line only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from conductor.policies.base import PlacementPolicy
from protocol.errors import ConfigError

_PARTS = ("name", "balancing_threshold", "by_session", "weigh")


def is_outside(name: str) -> bool:
    """Returns True if a name refers to code instead of a built-in policy."""
    return ":" in name


def load_policy(name: str) -> PlacementPolicy:
    """Makes a policy by calling its class without arguments. Raises ConfigError if it cannot be imported or made, or
    lacks an attribute of a policy."""
    place, _, class_name = name.rpartition(":")
    try:
        module = _module_of(place)
        policy = getattr(module, class_name)()
    except Exception as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the placement policy {name!r} cannot be made: {reason}") from error
    missing = [part for part in _PARTS if not hasattr(policy, part)]
    if missing:
        raise ConfigError(
            f"the placement policy {name!r} has no {', '.join(missing)}; "
            "conductor/policies/base.py says what a policy is"
        )
    made: PlacementPolicy = policy
    return made


def _module_of(place: str) -> ModuleType:
    """Imports a module, or executes a file anew under a prefixed module name, so that it does not hide a module."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(f"moonserve_policy_{path.stem}", path)
    assert spec is not None, "every .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return module
