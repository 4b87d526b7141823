"""The C file compiles cleanly wherever it can, and is done without where it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.native import C_FLAGS
from tests.compilers import compile_strictly, need_compiler
from tests.patience import PATIENCE_S
from tests.transfer.conftest import ROOT
from transfer.native import library


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compilers_have_nothing_to_complain_about(compiler: str, tmp_path: Path) -> None:
    compile_strictly(compiler, library.SOURCE, C_FLAGS, tmp_path)


def test_without_a_folder_to_keep_it_the_library_is_made_for_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert library.data_plane.__wrapped__().name == "native"


SCRIPT = """
import logging, sys
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.native import data_plane

assert data_plane().name == "python"
options = TransferOptions(transports=(sys.argv[1],))
with (
    TransferEngine(cluster_token="t", options=options) as near,
    TransferEngine(cluster_token="t", options=options) as far,
):
    size = 3 << 20
    local, memory = near.allocate(size), far.allocate(size, readable=True)
    local.buffer[:] = bytes(range(256)) * (size // 256)
    remote = RemoteSegment(far.address, memory.segment_id)
    window_id = far.open_window(memory, [(0, size)])
    write = [Transfer(Op.WRITE, local, 0, remote, size // 2, size // 2, window_id)]
    near.submit(write, deadline_s=90).wait(90)
    assert memory.buffer[size // 2 :] == local.buffer[: size // 2]
    near.run([Transfer(Op.READ, local, 0, remote, size // 2 - 100, 200)], deadline_s=90)
    assert local.buffer[:200] == memory.buffer[size // 2 - 100 : size // 2 + 100]
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_engines_transfer_with_the_twin(transport: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, transport],
        env={"PATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no C compiler" in done.stderr
