"""Parts of a cluster as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.prefill_worker.cluster import TOKEN

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process_of(
    module: str, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process and its RPC address, once it is ready; killed at the end if it still runs."""
    read_fd, write_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *flags,
        "--status-fd",
        str(write_fd),
        cwd=ROOT,
        env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
        pass_fds=[write_fd],
    )
    os.close(write_fd)
    try:
        yield process, await asyncio.to_thread(_ready_address, read_fd)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _ready_address(read_fd: int) -> str:
    with open(read_fd) as reports:
        for line in reports:
            report = json.loads(line)
            if "ready" in report:
                address: str = report["ready"]["rpc"]
                return address
    raise AssertionError("the process ended before it was ready")
