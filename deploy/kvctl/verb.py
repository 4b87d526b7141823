"""What verbs' argument parsers have in common."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from deploy.kvctl.cluster import Cluster
from deploy.terminal.output import Output

Run: TypeAlias = Callable[[Namespace, Cluster, Output], Awaitable[int]]
Verbs: TypeAlias = "_SubParsersAction[ArgumentParser]"  # argparse has no public name for it


def add(verbs: Verbs, name: str, run: Run, common: ArgumentParser, help: str) -> ArgumentParser:
    """The parser of one verb, for arguments of its own."""
    parser = verbs.add_parser(name, parents=[common], help=help, description=help)
    parser.set_defaults(run=run, asks_stores=True)
    return parser
