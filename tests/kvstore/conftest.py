"""Fixture: the store node that the tests of a module share."""

from collections.abc import Iterator

import pytest

from tests.kvstore.node.nodes import Node, running_node


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A node with the module's DRAM, shared by tests that leave nothing but their own objects behind."""
    with running_node("--dram", str(request.module.DRAM)) as node:
        yield node
