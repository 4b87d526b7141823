"""The model folder: finds or downloads it, and reads its JSON files with checks. Every error names file and field."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from moonserve.protocol.errors import ConfigError

T = TypeVar("T")

GGUF = ".gguf"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_CONFIGURATION = ["config.json", "generation_config.json"]
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]


def resolve_model(name_or_path: str, judge: Callable[[Path], object] = lambda folder: None) -> Path:
    """Returns the folder of a model: `name_or_path` itself if it is a folder, one made of its metadata if it is a GGUF
    file, otherwise the hub repository `organisation/name`, downloaded or taken from the hub's cache. `judge` gets the
    folder once config.json is in it, before weights are downloaded, and raises ConfigError for a model that cannot be
    served. Raises ConfigError."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        judge(path)
        return path
    if path.is_file() and path.suffix == GGUF:
        from moonserve.engine.model.config.gguf_folder import gguf_folder  # its package imports this module

        folder = gguf_folder(path)
        judge(folder)
        return folder
    if path.exists():
        raise ConfigError(f"model {name_or_path} is a file; give the folder that holds config.json, or a {GGUF} file")
    if not _REPOSITORY.fullmatch(name_or_path):
        raise ConfigError(f"model {name_or_path} is neither a folder nor a hub name like organisation/name")
    judge(_download(name_or_path, _CONFIGURATION))
    return _download(name_or_path, _FILES)


def _download(name: str, files: list[str]) -> Path:
    """Downloads what is missing of these files, with progress, from where an earlier download ended."""
    # Imported here: the import is slow and a local folder does not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        # The hub's client raises its own errors, its HTTP library's and OSError. The operator treats all alike.
        raise ConfigError(
            f"model {name} is not a local folder and cannot be downloaded from the hub: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: is {path.parent} a model folder?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


class JsonFields:
    """Fields of one JSON object. null counts as absent. Raises ConfigError for a wrong type or range."""

    def __init__(self, content: dict[str, Any], *, source: str) -> None:
        self._content = content
        self._source = source

    def error(self, complaint: str) -> ConfigError:
        return ConfigError(f"{self._source}: {complaint}")

    def has(self, name: str) -> bool:
        """True if the field is present, even as null, for fields where null and absent differ."""
        return name in self._content

    @property
    def is_empty(self) -> bool:
        return not self._content

    def objects(self) -> list[str]:
        """Returns the names of fields that are objects."""
        return [name for name, value in self._content.items() if isinstance(value, dict)]

    def _get(self, name: str, what: str, fits: Callable[[Any], bool]) -> Any:
        value = self._content.get(name)
        if value is not None and not fits(value):
            raise self.error(f"{name} must be {what}, not {value!r}")
        return value

    def _required(self, name: str, value: T | None, default: T | None) -> T:
        found = default if value is None else value
        if found is None:
            raise self.error(f"{name} is missing")
        return found

    def optional_count(self, name: str, *, minimum: int = 1) -> int | None:
        value: int | None = self._get(name, "an integer", _is_integer)
        if value is not None and value < minimum:
            raise self.error(f"{name} must be at least {minimum}, not {value}")
        return value

    def count(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        return self._required(name, self.optional_count(name, minimum=minimum), default)

    def optional_number(self, name: str) -> float | None:
        value = self._get(name, "a number", lambda each: _is_integer(each) or type(each) is float)
        return None if value is None else float(value)

    def number(self, name: str, *, default: float | None = None) -> float:
        return self._required(name, self.optional_number(name), default)

    def flag(self, name: str, *, default: bool) -> bool:
        value: bool | None = self._get(name, "true or false", lambda each: isinstance(each, bool))
        return self._required(name, value, default)

    def text(self, name: str, *, default: str) -> str:
        value: str | None = self._get(name, "a string", lambda each: isinstance(each, str))
        return self._required(name, value, default)

    def strings(self, name: str) -> tuple[str, ...] | None:
        value = self._get(name, "a list of strings", lambda each: _is_list_of(each, str))
        return None if value is None else tuple(value)

    def token_ids(self, name: str) -> list[int]:
        """Returns a field that holds one id or a list of ids; empty if it is absent."""
        what = "a token id or a list of them"
        value = self._get(name, what, lambda each: _is_integer(each) or _is_list_of(each, int))
        return [] if value is None else value if isinstance(value, list) else [value]

    def nested(self, name: str) -> "JsonFields | None":
        """Returns the fields of a nested object, or None if it is absent."""
        value = self._get(name, "an object", lambda each: isinstance(each, dict))
        return None if value is None else JsonFields(value, source=f"{self._source}: {name}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)
