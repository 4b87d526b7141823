"""Command-line program that runs a command in the guest: `python -m tests.rdma.guest [options] -- command …`."""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from tests.rdma.guest import kernel, machine
from tests.rdma.guest.kernel import GuestUnavailable

_UNAVAILABLE = 77  # automake's exit status of a skipped test


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.rdma.guest", description=__doc__)
    parser.add_argument("--prepare", action="store_true", help="fetch the kernel package and stop")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="kill it after S seconds")
    parser.add_argument("command", nargs="*", help="one argument is taken as a shell command")
    given = parser.parse_args()
    try:
        if given.prepare:
            kernel.fetch(machine.cache_folder())
            return 0
        job = given.command[0] if len(given.command) == 1 else shlex.join(given.command)
        with tempfile.TemporaryDirectory(prefix="moonserve-guest-") as folder:
            return machine.run(job, Path(folder), given.timeout, _say)
    except (GuestUnavailable, machine.GuestFailed) as error:
        sys.stderr.write(f"{error}\n")
        return _UNAVAILABLE


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
