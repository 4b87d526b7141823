"""What differs between a page in the repository and the same page on the site.

ARCHITECTURE.md and its like stand at the repository's root, where people look for them; on the site they lie beside the
pages of docs/, and links between the two places follow. Info strings of blocks lose what is for tests only
(tests/docs/fences.py), which Markdown's extensions do not know. Knows nothing of what pages say.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md")
ROOT = Path(__file__).parents[2]

_FROM_ROOT = re.compile(r"\]\(docs/")
_TO_ROOT = re.compile(rf"\]\(\.\./({'|'.join(map(re.escape, PAGES))})")
_FOR_TESTS = re.compile(r'^(```.*?) (?:skip="[^"]*"|cluster|output)(?=$| )', re.MULTILINE)
_FLAG = re.compile(r"<code>(--[a-z][a-z0-9-]{1,30})</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page as the site has it."""
    return as_on_site(markdown, at_root=page.file.src_uri in PAGES)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A flag is not broken behind its dashes."""
    return _FLAG.sub(r'<code class="flag">\1</code>', html)


def as_on_site(markdown: str, *, at_root: bool) -> str:
    """`markdown` of a page of the root or of docs/, with the site's links and blocks."""
    pattern, target = (_FROM_ROOT, "](") if at_root else (_TO_ROOT, r"](\1")
    return _FOR_TESTS.sub(r"\1", pattern.sub(target, markdown))
