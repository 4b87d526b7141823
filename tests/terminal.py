"""Program on its own pseudo-terminal: its output, and the keys typed."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence

from tests.patience import PATIENCE_S

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")
COLUMNS, ROWS = 120, 40


class Terminal:
    """Near end of a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._seen = ""
        self._from = 0  # end of the last match; the next search starts here

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Waits until the program shows the pattern after the last match. Ignores colours and cursor movements."""
        give_up_at = time.monotonic() + PATIENCE_S
        while (found := re.compile(pattern).search(self.text, self._from)) is None:
            assert time.monotonic() < give_up_at, f"{pattern!r} is not in {self.text!r}"
            assert self._read(), f"it ended without {pattern!r}: {self.text!r}"
        self._from = found.end()
        return found

    def ended(self) -> int:
        """Waits until the program ends and returns its exit code."""
        give_up_at = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < give_up_at, f"it goes on: {self.text!r}"
        return self.process.wait(PATIENCE_S)

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._seen).replace("\r\n", "\n")

    def _read(self) -> bool:
        """Reads more output. False if there can be no more."""
        ready, _, _ = select.select([self._fd], [], [], 0.1)
        if not ready:
            return True
        try:
            read = os.read(self._fd, 65536)
        except OSError:  # Linux reports EIO when the other end is closed
            return False
        self._seen += read.decode(errors="replace")
        return bool(read)


@contextlib.contextmanager
def terminal(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """Runs a command until the block ends."""
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", **(environ or {})}
    env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    owning = ["setsid", "--ctty", *command]
    process = subprocess.Popen(owning, stdin=far, stdout=far, stderr=far, env=env)
    os.close(far)
    try:
        yield Terminal(process, near)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(near)
