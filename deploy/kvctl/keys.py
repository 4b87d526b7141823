"""KEY on the command line. Pure."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from deploy.terminal.output import SHORT_KEY_DIGITS
from kvstore.client.keys import plain_key
from protocol.keys import BlockKey

HELP = "32 hex digits are a block key; anything else is a plain key, found under its digest"
_BLOCK_KEY = re.compile(r"[0-9a-fA-F]{32}")
_CUT_KEY = re.compile(rf"[0-9a-f]{{{SHORT_KEY_DIGITS}}}")


def add_to(parser: ArgumentParser, *, several: bool = False) -> None:
    parser.add_argument(
        "keys" if several else "key", metavar="KEY", help=HELP, nargs="+" if several else None
    )
    parser.add_argument(
        "--plain", action="store_true", help="KEY is a plain key even if it looks like a block key"
    )


def parse(text: str, *, plain: bool) -> BlockKey:
    """Raises InvalidRequest for a plain key that is too long."""
    if not plain and _BLOCK_KEY.fullmatch(text):
        return BlockKey(bytes.fromhex(text))
    return plain_key(text.encode(errors="surrogateescape"))


def texts_by_key(texts: Iterable[str], arguments: Namespace) -> dict[BlockKey, str]:
    """Each key once, with what the operator called it."""
    return {parse(text, plain=arguments.plain): text for text in texts}


def no_such_key(text: str) -> str:
    if _CUT_KEY.fullmatch(text):
        return f"no such key: {text} (digits of a cut key? --long shows all 32)"
    return f"no such key: {text}"
