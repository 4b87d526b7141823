"""Policies of users' own: `FILE.py:CLASS` or `MODULE:CLASS`, named where a process starts.

Such a name runs code, so that it is believed from the command line only.
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
    """Whether it names code instead of one of ours."""
    return ":" in name


def load_policy(name: str) -> PlacementPolicy:
    """Made without arguments. Raises ConfigError for what cannot be imported or is no policy."""
    place, _, class_name = name.rpartition(":")
    try:
        module = _module_of(place)
        policy = getattr(module, class_name)()
    except Exception as error:  # whatever a stranger's code raises
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
    """A file is executed anew each time, under a name of its own, so that none of ours is hidden by it."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(f"moonserve_policy_{path.stem}", path)
    assert spec is not None, "every .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
