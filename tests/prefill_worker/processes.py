"""Parts of a cluster as processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.status import until_ready
from tests.processes import ROOT
from tests.worker.parts import TOKEN


@asynccontextmanager
async def process_of(module: str, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
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
        yield process, (await until_ready(read_fd))["rpc"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
