"""Training data of the demo model: the source of the Python standard library, and short samples cut out of it.

The same interpreter gives the same files with the same digest. An epoch with a given seed is always the same token
stream.
"""

import ast
import hashlib
import platform
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from tokenizers import Tokenizer

from docs.demo_model.tokenizer import BOS, EOS, IM_END, IM_START, SPECIAL_IDS

Files = Mapping[str, str]
"""Text by POSIX path below the root, sorted by path."""

EXCLUDED_DIRECTORIES = (
    *("__pycache__", "dist-packages", "encodings", "idle_test"),
    *("pydoc_data", "site-packages", "test", "tests"),
)
# Build records of one interpreter, and tests.
EXCLUDED_DIRECTORY_PREFIXES = ("config-",)
EXCLUDED_FILE_PREFIXES = ("_sysconfigdata", "test_")
GENERATED_TABLES = ("html/entities.py", "stringprep.py")
VALIDATION_PERCENT = 2

MIN_FUNCTION_LINES = 4
MAX_FUNCTION_BYTES = 1600  # about 450 tokens: an exchange then fits in one training window
CHAT_SHARE = SNIPPET_SHARE = 0.06  # of the file tokens
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You write Python code.",
    "You are a Python programmer. Answer with code only.",
)
COMPLETE_PROMPTS = (
    "Complete this Python code:\n{code}",
    "Continue this code:\n{code}",
    "Finish this function:\n{code}",
)
DOCSTRING_PROMPTS = (
    "Write the docstring of this function:\n{code}",
    "Write a docstring for this code:\n{code}",
    "What does this function do?\n{code}",
)
NAME_PROMPTS = (
    "Write a function named {name}",
    "Write a Python function named {name}.",
    "Write a Python function {signature}",
    "Implement {signature} in Python.",
    "Show me the source of {name}.",
)
PURPOSE_PROMPTS = (
    "Write a function for this: {purpose}",
    "Write a Python function. {purpose}",
    "{purpose} Write the code.",
)


# -- files


def read_files(root: Path) -> Files:
    """Reads the selected non-empty files below `root`. Raises UnicodeDecodeError for a file that is not UTF-8."""
    relative = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    texts = {p: relative[p].read_text(encoding="utf-8") for p in sorted(relative) if _selects(p)}
    return {path: text for path, text in texts.items() if text.strip()}


def _selects(path: str) -> bool:
    *folders, name = PurePosixPath(path).parts
    if path in GENERATED_TABLES or name.startswith(EXCLUDED_FILE_PREFIXES):
        return False
    return not any(
        folder in EXCLUDED_DIRECTORIES or folder.startswith(EXCLUDED_DIRECTORY_PREFIXES) for folder in folders
    )


def split_files(files: Files) -> tuple[Files, Files]:
    """Splits files into (training, held out) by a hash of the path alone."""
    parts: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for path, text in files.items():
        bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 100
        parts[bucket < VALIDATION_PERCENT][path] = text
    return parts


def describe_corpus(training: Files, validation: Files) -> dict[str, object]:
    """Returns the corpus record: selection rules, selected files, and a digest to compare runs by."""
    return {
        "source": "Python standard library",
        "license": "PSF-2.0",
        "python_version": platform.python_version(),
        "rules": {
            "suffix": ".py",
            "encoding": "utf-8, universal newlines",
            "order": "sorted by POSIX path",
            "excluded_directories": list(EXCLUDED_DIRECTORIES),
            "excluded_directory_prefixes": list(EXCLUDED_DIRECTORY_PREFIXES),
            "excluded_file_prefixes": list(EXCLUDED_FILE_PREFIXES),
            "excluded_generated_tables": list(GENERATED_TABLES),
            "validation": f"sha256(path) mod 100 < {VALIDATION_PERCENT}",
        },
        "training": _describe_files(training),
        "validation": _describe_files(validation),
    }


def _describe_files(files: Files) -> dict[str, object]:
    state = hashlib.sha256()
    for pair in files.items():
        for field in (part.encode() for part in pair):
            state.update(len(field).to_bytes(8, "big") + field)
    num_bytes = sum(len(text.encode()) for text in files.values())
    return {"num_files": len(files), "num_bytes": num_bytes, "sha256": state.hexdigest()}


# -- samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function of the corpus, dedented to column 0. `bare_source` lacks its docstring, which may be empty."""

    name: str
    signature: str
    source: str
    docstring: str
    bare_source: str


def find_functions(texts: Iterable[str]) -> Iterator[Function]:
    """Yields functions and methods that are neither trivial nor long."""
    for text in texts:
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            num_lines = (node.end_lineno or 0) - node.lineno + 1
            if node.body[0].lineno > node.lineno and num_lines >= MIN_FUNCTION_LINES:
                function = _cut_function(node, lines)
                if len(function.source.encode()) <= MAX_FUNCTION_BYTES:
                    yield function


def _cut_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function:
    def cut(first: int, last: int) -> str:
        return "".join(_dedent(line, node.col_offset) for line in lines[first - 1 : last])

    end, first = node.end_lineno or node.lineno, node.body[0]
    source = bare_source = cut(node.lineno, end)
    docstring = ast.get_docstring(node) if len(node.body) > 1 else None
    if docstring is not None:
        tail = cut((first.end_lineno or first.lineno) + 1, end)
        bare_source = cut(node.lineno, first.lineno - 1) + tail.lstrip("\n")
    return Function(
        name=node.name,
        signature=f"{node.name}({ast.unparse(node.args)})",
        source=source,
        docstring=docstring or "",
        bare_source=bare_source,
    )


def _dedent(line: str, indentation: int) -> str:
    if not line.strip():
        return "\n"
    return line if line[:indentation].strip() else line[indentation:]


def make_chat(function: Function, rng: random.Random) -> list[tuple[str, str]]:
    """Returns (role, content) turns of one exchange about `function`: complete it, write it or document it."""
    way = rng.randrange(4 if function.docstring else 2)
    if way == 0:
        prompt, answer = _cut_after_line(function.source, rng)
        user = rng.choice(COMPLETE_PROMPTS).format(code=prompt.rstrip("\n"))
    elif way == 1:
        names = {"name": function.name, "signature": function.signature}
        user, answer = rng.choice(NAME_PROMPTS).format(**names), function.source
    elif way == 2:
        code = function.bare_source.rstrip("\n")
        user, answer = rng.choice(DOCSTRING_PROMPTS).format(code=code), function.docstring
    else:
        purpose = " ".join(function.docstring.split("\n\n")[0].split())
        user, answer = rng.choice(PURPOSE_PROMPTS).format(purpose=purpose), function.source
    turns = [("user", user), ("assistant", answer.rstrip("\n"))]
    return [("system", rng.choice(SYSTEM_PROMPTS)), *turns] if rng.random() < 0.25 else turns


def make_snippet(function: Function, rng: random.Random) -> tuple[str, str]:
    """Cuts `function` where a prompt might end: after a line break, before one, or anywhere. The halves are tokenized
    separately, so that the model learns tokens that follow the end of a prompt."""
    way, source = rng.randrange(3), function.source
    end = rng.randrange(1, len(source))
    if way:
        end = len(_cut_after_line(source, rng)[0]) - (way - 1)
    return source[:end], source[end:]


def _cut_after_line(source: str, rng: random.Random) -> tuple[str, str]:
    lines = source.splitlines(keepends=True)
    kept = rng.randrange(1, max(2, len(lines) * 2 // 3))
    return "".join(lines[:kept]), "".join(lines[kept:])


# -- tokens


class TokenSource:
    """The token stream of an epoch: every file once, plus fresh samples, shuffled."""

    def __init__(self, tokenizer: Tokenizer, files: Files, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._documents = [self._document([text]) for text in files.values()]
        self._functions = list(find_functions(files.values()))
        self.num_file_tokens = sum(map(len, self._documents))

    def files_only(self) -> np.ndarray:
        """Returns the files in order, without samples: uint16 [num_tokens]."""
        return np.concatenate(self._documents)

    def epoch_stream(self, epoch: int) -> np.ndarray:
        """Returns the packed stream of `epoch`: uint16 [num_tokens]."""
        rng = random.Random(f"{self._seed}-{epoch}")
        documents = list(self._documents)
        for share, make in ((CHAT_SHARE, self._chat), (SNIPPET_SHARE, self._snippet)):
            budget = round(self.num_file_tokens * share)
            while budget > 0:
                documents.append(make(rng))
                budget -= len(documents[-1])
        rng.shuffle(documents)
        return np.concatenate(documents)

    def _snippet(self, rng: random.Random) -> np.ndarray:
        return self._document(make_snippet(rng.choice(self._functions), rng))

    def _chat(self, rng: random.Random) -> np.ndarray:
        """Returns one exchange as the chat template renders it."""
        tokens: list[int] = []
        for role, content in make_chat(rng.choice(self._functions), rng):
            tokens += [SPECIAL_IDS[IM_START], *self._encode(f"{role}\n{content}")]
            tokens += [SPECIAL_IDS[IM_END], *self._encode("\n")]
        return _enclosed(tokens)

    def _document(self, parts: Sequence[str]) -> np.ndarray:
        """Returns one document whose parts are tokenized separately."""
        return _enclosed([token for part in parts for token in self._encode(part)])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _enclosed(tokens: list[int]) -> np.ndarray:
    return np.array([SPECIAL_IDS[BOS], *tokens, SPECIAL_IDS[EOS]], dtype=np.uint16)


def window_starts(num_tokens: int, length: int, seed: Sequence[int]) -> np.ndarray:
    """Returns the shuffled starts of an epoch's windows. A window has `length` + 1 tokens, since the last one is only a
    target. The first start is random, so that cuts differ between epochs."""
    generator = np.random.default_rng([*seed, length])
    first = int(generator.integers(length))
    return generator.permutation(np.arange(first, num_tokens - length, length, dtype=np.int64))


def cut_windows(stream: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Cuts windows out of the stream: int64 [len(starts), length + 1]."""
    return stream[starts[:, None] + np.arange(length + 1)].astype(np.int64)
