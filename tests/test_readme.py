"""What the README shows, runs."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.ports import free_port
from kvstore.client import connect
from tests.kvstore.directory.cluster import running_directory
from tests.kvstore.nodes import TOKEN, running_node
from tests.patience import until

README = (Path(__file__).parents[1] / "README.md").read_text()


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_transfer_engine_alone_takes_ten_lines_that_run() -> None:
    [code] = [snippet for snippet in snippets() if "TransferEngine" in snippet]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "README.md", "exec"), {})


def test_the_store_alone_takes_ten_lines_that_run() -> None:
    [code] = [snippet for snippet in snippets() if "kvstore.client" in snippet]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    port = free_port()
    with running_directory(port=port), running_node("--dram", "8MiB", "--join", f"127.0.0.1:{port}"):
        with connect(f"127.0.0.1:{port}", cluster_token=TOKEN) as store:
            until(store.nodes)  # a node is ready before it belongs to the others
        code = code.replace("127.0.0.1:7000", f"127.0.0.1:{port}").replace('"secret"', repr(TOKEN))
        exec(compile(code, "README.md", "exec"), {})
