"""Which version of the code a result came from: a digest of a module's source and of all that it imports from here.

Follows import statements, the ones inside functions too. Packages from outside the project count by nothing, since
results do not depend on their version; nor does generated or compiled code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = frozenset({"conductor", "kvstore", "protocol", "traces"})  # of those, what is pure
_DIGEST_BYTES = 16


def source_digest(module: str) -> str:
    """Equal for equal sources. Raises ModuleNotFoundError for a module that is not there."""
    files: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in files:
            continue
        path = _path_of(name)
        if path is None:
            continue
        files[name] = path.read_bytes()
        waiting += [each for each in _imports(files[name]) if each.split(".")[0] in _PACKAGES]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()


def _path_of(name: str) -> Path | None:
    """None for a name in a module, which `from module import name` may be as well as a module in a package."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    return Path(found.origin)


def _imports(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
