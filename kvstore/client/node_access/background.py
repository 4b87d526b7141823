"""The background event loop of a store's client, in its own thread.

It runs membership, reports of use, renewals and calls over gRPC. A caller from another thread waits for a bounded time.
Knows nothing of stores.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from moonserve.protocol.errors import DeadlineExceeded, PeerLost
from moonserve.protocol.process.event_loop import cancel_all

T = TypeVar("T")


class BackgroundLoop:
    """A running background loop; `close` it after the last call to `run`.

    Given a `loop` that is already running, it has no thread; call `cancel_all` in that loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()
        self._held: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="kvstore client", daemon=True)
        if loop is None:
            self._thread.start()

    def run(self, body: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs `body` and returns or raises its outcome. On timeout, cancels it and raises DeadlineExceeded."""
        future = self.start(body)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise DeadlineExceeded(f"no answer within {timeout_s:.1f} s") from error
        except concurrent.futures.CancelledError as error:
            raise PeerLost("the client of the store is closed") from error

    def start(self, body: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `body`, which runs until it ends or the loop is closed."""
        try:
            future = asyncio.run_coroutine_threadsafe(body, self._loop)
        except RuntimeError as error:  # the loop is closed
            body.close()
            raise PeerLost("the client of the store is closed") from error
        self._held.add(future)
        future.add_done_callback(self._held.discard)
        return future

    def wake(self, event: asyncio.Event) -> None:
        """Sets an event of this loop from any thread. No-op once closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Cancels running tasks and stops the thread. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def cancel_all(self) -> None:
        """Cancels running tasks and waits for them."""
        await cancel_all([asyncio.wrap_future(future) for future in self._held])

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left at its end
            runner.get_loop().run_forever()


async def await_despite_cancellation(call: asyncio.Future[T]) -> T:
    """Returns the result of `call`. If cancelled, waits for `call` to end first and then raises the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not call.done():
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # raised below
            break
    if cancelled is None:
        return call.result()
    if not call.cancelled():
        call.exception()  # retrieved, to avoid asyncio's log about an exception nobody retrieved
    raise cancelled
