"""Selects the training corpus: the Python standard library's own source.

Owns the selection rules, the hash split and the corpus record. Its rule: the same interpreter
gives the same files, in the same order, with the same digest. It does not know about tokens.
"""

import hashlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

EXCLUDED_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",  # character tables generated from the Unicode consortium's files
        "idle_test",
        "pydoc_data",  # generated from the reference manual
        "site-packages",
        "test",
        "tests",
    }
)
# Build records of one interpreter: compiler flags and install paths, not library source.
EXCLUDED_DIRECTORY_PREFIXES = ("config-",)
EXCLUDED_FILE_PREFIXES = ("_sysconfigdata", "test_")
GENERATED_TABLES = frozenset({"html/entities.py", "stringprep.py"})
VALIDATION_PERCENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the corpus: its POSIX path below the root, its text with ``\n`` line ends."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The corpus after the split; both halves are sorted by path."""

    training: tuple[SourceFile, ...]
    validation: tuple[SourceFile, ...]


def standard_library_root() -> Path:
    """The directory that holds the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_selected(path: PurePosixPath) -> bool:
    """Whether the rules admit ``path``, which is relative to the corpus root."""
    if path.suffix != ".py" or path.as_posix() in GENERATED_TABLES:
        return False
    if path.name.startswith(EXCLUDED_FILE_PREFIXES):
        return False
    return not any(_is_excluded_directory(name) for name in path.parts[:-1])


def _is_excluded_directory(name: str) -> bool:
    return name in EXCLUDED_DIRECTORIES or name.startswith(EXCLUDED_DIRECTORY_PREFIXES)


def is_validation(path: str) -> bool:
    """Whether the file is held out: decided by its path alone, so the split survives edits."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 100
    return bucket < VALIDATION_PERCENT


def read_files(root: Path) -> Iterator[SourceFile]:
    """Yield the selected, non-empty files below ``root``, sorted by POSIX path.

    Raises ``UnicodeDecodeError`` for a file that is not UTF-8: the rules should name it.
    """
    relative = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    for path in sorted(relative):
        if not is_selected(PurePosixPath(path)):
            continue
        text = relative[path].read_text(encoding="utf-8", errors="strict")
        if text.strip():
            yield SourceFile(path=path, text=text)


def load_corpus(root: Path) -> Corpus:
    """Read the corpus below ``root`` and split it."""
    files = tuple(read_files(root))
    return Corpus(
        training=tuple(file for file in files if not is_validation(file.path)),
        validation=tuple(file for file in files if is_validation(file.path)),
    )


def digest(files: Sequence[SourceFile]) -> str:
    """SHA-256 over each file's path and text, in order, each preceded by its length in bytes."""
    state = hashlib.sha256()
    for file in files:
        for field in (file.path.encode(), file.text.encode()):
            state.update(len(field).to_bytes(8, "big") + field)
    return state.hexdigest()


def describe(corpus: Corpus) -> dict[str, object]:
    """The corpus record: the rules, what they selected, and a digest to compare runs by."""
    return {
        "source": "Python standard library",
        "license": "PSF-2.0",
        "python_version": platform.python_version(),
        "rules": {
            "suffix": ".py",
            "encoding": "utf-8, universal newlines",
            "order": "sorted by POSIX path",
            "excluded_directories": sorted(EXCLUDED_DIRECTORIES),
            "excluded_directory_prefixes": list(EXCLUDED_DIRECTORY_PREFIXES),
            "excluded_file_prefixes": list(EXCLUDED_FILE_PREFIXES),
            "excluded_generated_tables": sorted(GENERATED_TABLES),
            "validation": f"sha256(path) mod 100 < {VALIDATION_PERCENT}",
        },
        "training": _describe_files(corpus.training),
        "validation": _describe_files(corpus.validation),
    }


def _describe_files(files: Sequence[SourceFile]) -> dict[str, object]:
    return {
        "num_files": len(files),
        "num_bytes": sum(len(file.text.encode()) for file in files),
        "sha256": digest(files),
    }
