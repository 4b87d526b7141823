"""An embedded registry in a process of its own: `python -m tests.protocol.registry.serve PORT`. Prints its address."""

from __future__ import annotations

import asyncio
import sys

from protocol.process import die_with_parent
from tests.protocol.registry.conftest import served


async def main(port: int) -> None:
    async with served(port) as address:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent(None)
    asyncio.run(main(int(sys.argv[1])))
