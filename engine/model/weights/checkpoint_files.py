"""Finds and opens the files of a checkpoint (safetensors, sharded or not, or GGUF), and compares them with a list of
tensors."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from moonserve.engine.model.config.quantised_checkpoint import QuantisedCheckpoint
from moonserve.engine.model.weights.gguf_file import GgufFile
from moonserve.protocol.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMES_SHOWN = 5
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # stored by old exporters, but computed here


def open_tensors(path: Path, stack: ExitStack, checkpoint: QuantisedCheckpoint | None) -> Iterator[tuple[str, Any]]:
    """Yields (name, open file) of every stored tensor. Raises ConfigError."""
    if checkpoint is not None and checkpoint.file:
        gguf = GgufFile(Path(checkpoint.file), path)
        yield from ((name, gguf) for name in gguf.names)
        return
    for file_path in _files(path):
        try:
            file = stack.enter_context(safe_open(file_path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file_path} cannot be read as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file


def _files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.exists():
        single = path / _SINGLE
        if not single.exists():
            raise ConfigError(
                f"{path} has no weights: neither {_SINGLE} nor {_INDEX} is there "
                "(only safetensors are read; --load-format dummy runs without weights)"
            )
        return [single]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [name for name in names if not (path / name).exists()]
    if missing:
        raise ConfigError(f"{path} lacks {_some(missing)} that its {_INDEX} names")
    return [path / name for name in names]


def _some(names: Sequence[str]) -> str:
    """Returns the names for a message, at most the first few."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def check_shapes(
    path: Path, expected: Mapping[str, list[int]], stored: Mapping[str, list[int]], optional: Collection[str]
) -> None:
    """Raises ConfigError that lists missing, unexpected and misshapen tensors. `optional`: tensors without a use."""
    missing = [name for name in expected if name not in stored]
    unexpected = [
        name
        for name in stored
        if name not in expected and name not in optional and not name.endswith(_IGNORED_SUFFIXES)
    ]
    misshapen = [
        f"{name} {stored[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    complaints = [
        f"{what} {_some(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if names
    ]
    if complaints:
        raise ConfigError(f"weights in {path} do not fit its config.json: {'; '.join(complaints)}")
