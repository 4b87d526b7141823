"""Real redis-server for one test, on a free loopback port and without persistence.

The system's Redis service is never used. A Redis that is restarted here comes back empty.
"""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from moonserve.deploy.launcher.ports import free_port
from tests.patience import PATIENCE_S
from tests.processes import binary
from tests.stopping import stop

_TRIES = 5  # another process may take the port between its choice and its use


class RedisServer:
    """Redis server, started with `arguments`. With `sentinel` lines it is a Sentinel with this configuration."""

    def __init__(self, *arguments: str, sentinel: Sequence[str] = ()) -> None:
        self._binary = binary("redis-server")
        self._made_with = self._arguments = arguments
        self._sentinel = sentinel
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = Path()
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}"

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    def __enter__(self) -> "RedisServer":
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="redis-")))
        for _ in range(_TRIES):
            self.port = free_port()
            with contextlib.suppress(ChildProcessError):
                self.start()
                return self
        raise ChildProcessError(f"redis-server does not start: {self.output()}")

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._stack.close()

    def start(self) -> None:
        """Starts on the same port as before and waits for an answer. Raises ChildProcessError if the process ends."""
        with open(self.folder / "output", "ab") as output:
            self._process = subprocess.Popen(self._command(), cwd=self.folder, stdout=output, stderr=output)
        give_up_at = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                self.kill()
                raise ChildProcessError(self.output())
            time.sleep(0.01)

    def kill(self) -> None:
        """Kills the server by SIGKILL, like a power loss."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *arguments: str) -> None:
        """Restarts with these arguments, or with the original ones if none are given."""
        self.kill()
        self._arguments = arguments or self._made_with
        self.start()

    def stop(self) -> None:
        """Suspends the server by SIGSTOP: its port still accepts, and nothing answers."""
        assert self._process is not None
        stop(self._process.pid)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *command: str) -> bytes:
        """Returns the raw reply (RESP) to one command with a short reply, for tests without a client."""
        encoded = [part.encode() for part in command]
        request = b"*%d\r\n" % len(encoded)
        request += b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in encoded)
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            connection.sendall(request)
            return connection.recv(64 * 1024)

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def _command(self) -> list[str]:
        # No code of this process may run between fork and exec, because gRPC's threads may hold locks that it needs.
        setpriv = shutil.which("setpriv")
        ends_with_us = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        common = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        if self._sentinel:
            configuration = self.folder / "sentinel.conf"
            if not configuration.exists():  # afterwards the Sentinel rewrites it
                configuration.write_text("".join(f"{line}\n" for line in self._sentinel))
            return [*ends_with_us, self._binary, str(configuration), "--sentinel", *common]
        memory_only = ["--save", "", "--appendonly", "no"]
        local = ["--unixsocket", str(self.socket_path), "--unixsocketperm", "600"]
        return [*ends_with_us, self._binary, *common, *memory_only, *local, *self._arguments]

    def _answers(self) -> bool:
        try:
            reply = self.ask("PING")
        except OSError:
            return False
        return reply.startswith((b"+PONG", b"-NOAUTH"))


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    """Server shared by the tests of a module. The tests of registries use different prefixes."""
    with RedisServer() as server:
        yield server
