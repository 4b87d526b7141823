"""Makes short training samples out of corpus files: chat exchanges and stand-alone snippets.

Owns the wording of the exchanges. Everything in an answer is text of the corpus, cut out with
``ast``. It does not know about tensors; randomness comes in as a ``random.Random``.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.corpus import SourceFile

MIN_FUNCTION_LINES = 4
MAX_FUNCTION_BYTES = 1600  # about 450 tokens: an exchange then fits in one training window
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function of the corpus, dedented to column 0.

    ``docstring`` is empty if there is none; ``bare_source`` is the source without it.
    """

    name: str
    signature: str
    source: str
    docstring: str
    bare_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat; ``role`` is system, user or assistant."""

    role: str
    content: str


def find_functions(files: Sequence[SourceFile]) -> Iterator[Function]:
    """Yield the functions and methods of ``files`` that are neither trivial nor long."""
    for file in files:
        lines = file.text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(file.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_usable(node):
                function = _cut_function(node, lines)
                if len(function.source.encode()) <= MAX_FUNCTION_BYTES:
                    yield function


def _is_usable(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body_starts_below = node.body[0].lineno > node.lineno
    return body_starts_below and (node.end_lineno or 0) - node.lineno + 1 >= MIN_FUNCTION_LINES


def _cut_function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function:
    source = _cut_lines(lines, node.lineno, node.end_lineno or node.lineno, node.col_offset)
    docstring, bare_source = "", source
    first = node.body[0]
    if ast.get_docstring(node) is not None and len(node.body) > 1:
        docstring = ast.get_docstring(node) or ""
        head = _cut_lines(lines, node.lineno, first.lineno - 1, node.col_offset)
        tail_start = (first.end_lineno or first.lineno) + 1
        tail = _cut_lines(lines, tail_start, node.end_lineno or tail_start, node.col_offset)
        bare_source = head + tail.lstrip("\n")
    return Function(
        name=node.name,
        signature=f"{node.name}({ast.unparse(node.args)})",
        source=source,
        docstring=docstring,
        bare_source=bare_source,
    )


def _cut_lines(lines: list[str], first: int, last: int, indentation: int) -> str:
    """Lines ``first`` to ``last`` (both included, from 1) without ``indentation`` columns."""
    return "".join(_dedent(line, indentation) for line in lines[first - 1 : last])


def _dedent(line: str, indentation: int) -> str:
    if not line.strip():
        return "\n"
    return line if line[:indentation].strip() else line[indentation:]


def make_chat(function: Function, rng: random.Random) -> list[Message]:
    """Make one exchange about ``function``: complete it, document it, or write it."""
    makers = [_completion, _writing]
    if function.docstring:
        makers += [_documentation, _writing_from_purpose]
    user, assistant = rng.choice(makers)(function, rng)
    messages = [
        Message(role="user", content=user),
        Message(role="assistant", content=assistant.rstrip("\n")),
    ]
    if rng.random() < 0.25:
        messages.insert(0, Message(role="system", content=rng.choice(SYSTEM_PROMPTS)))
    return messages


def _completion(function: Function, rng: random.Random) -> tuple[str, str]:
    prompt, continuation = _cut_after_line(function.source, rng)
    return rng.choice(COMPLETE_PROMPTS).format(code=prompt.rstrip("\n")), continuation


def _writing(function: Function, rng: random.Random) -> tuple[str, str]:
    template = rng.choice(NAME_PROMPTS)
    return template.format(name=function.name, signature=function.signature), function.source


def _documentation(function: Function, rng: random.Random) -> tuple[str, str]:
    template = rng.choice(DOCSTRING_PROMPTS)
    return template.format(code=function.bare_source.rstrip("\n")), function.docstring


def _writing_from_purpose(function: Function, rng: random.Random) -> tuple[str, str]:
    purpose = " ".join(function.docstring.split("\n\n")[0].split())
    return rng.choice(PURPOSE_PROMPTS).format(purpose=purpose), function.source


def make_snippet(function: Function, rng: random.Random) -> tuple[str, str]:
    """Cut ``function`` where a caller's prompt might end: after a line break, before one, or anywhere.

    Prompt and continuation are tokenized apart, so the model also learns the token sequences
    that begin where a prompt ended, such as indentation after a final line break.
    """
    way, source = rng.randrange(3), function.source
    position = (
        len(_cut_after_line(source, rng)[0]) - (way - 1) if way else rng.randrange(1, len(source))
    )
    return source[:position], source[position:]


def _cut_after_line(source: str, rng: random.Random) -> tuple[str, str]:
    lines = source.splitlines(keepends=True)
    kept = rng.randrange(1, max(2, len(lines) * 2 // 3))
    return "".join(lines[:kept]), "".join(lines[kept:])
