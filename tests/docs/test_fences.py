"""Fenced blocks are found, and read as their info strings say."""

from __future__ import annotations

import pytest

from docs.hooks.site import as_on_site
from tests.docs.fences import Step, fences_of, steps_of, without_fences

PAGE = """Text.

```console
$ moonserve --version
moonserve …
```

```bash skip="needs a GPU"
make test
```

```python title="policy.py"
name = 1
```
"""


def test_languages_words_and_lines_are_read() -> None:
    console, bash, python = fences_of(PAGE)
    assert (console.language, console.line, console.runs) == ("console", 3, True)
    assert (bash.language, bash.words, bash.runs) == ("bash", {"skip": "needs a GPU"}, False)
    assert (python.words, python.text) == ({"title": "policy.py"}, "name = 1\n")
    assert "make test" not in without_fences(PAGE)


def test_a_console_is_commands_with_what_they_print() -> None:
    steps = steps_of("$ echo a \\\n  b\na b\n$ true\n$ echo c\nc\n")
    assert steps == [Step(command="echo a \\\n  b", shown="a b\n"), Step(command="true", shown=""),
                     Step(command="echo c", shown="c\n")]  # fmt: skip


def test_output_without_a_command_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with"):
        steps_of("hello\n")


def test_the_site_shows_a_block_without_what_is_for_tests() -> None:
    shown = as_on_site(PAGE, at_root=False)
    assert "```bash\nmake test" in shown
    assert '```python title="policy.py"\n' in shown


def test_links_between_the_root_and_the_docs_lead_to_the_site() -> None:
    assert as_on_site("[a](docs/traces.md#fetch)", at_root=True) == "[a](traces.md#fetch)"
    assert as_on_site("[a](../LOG.md)", at_root=False) == "[a](LOG.md)"
    assert as_on_site("[a](traces.md)", at_root=False) == "[a](traces.md)"
