"""The snippets in docs/libraries.md run."""

from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import connect
from tests.docs.fences import ROOT, fences_of
from tests.kvstore.faults.pool import running_directory
from tests.kvstore.node.nodes import TOKEN, running_node
from tests.patience import until


def snippet_with(name: str) -> str:
    page = (ROOT / "docs" / "libraries.md").read_text()
    [code] = [fence.text for fence in fences_of(page) if fence.language == "python" and name in fence.text]
    return code


def test_the_transfer_engine_alone_takes_ten_lines_that_run() -> None:
    code = snippet_with("TransferEngine")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "libraries.md", "exec"), {})


def test_the_store_alone_takes_ten_lines_that_run() -> None:
    code = snippet_with("moonserve.kvstore.client")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    port = free_port()
    with running_directory(port=port), running_node("--dram", "8MiB", "--join", f"127.0.0.1:{port}"):
        with connect(f"127.0.0.1:{port}", cluster_token=TOKEN) as store:
            until(store.nodes)  # a node is ready before it is a member
        code = code.replace("127.0.0.1:7000", f"127.0.0.1:{port}").replace('"secret"', repr(TOKEN))
        exec(compile(code, "libraries.md", "exec"), {})
