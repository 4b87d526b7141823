"""Headless Chromium for tests, controlled as a person would: keys, window width, light or dark colours.

Speaks the DevTools protocol (JSON over a WebSocket that the browser opens on loopback). Skips the test if there is no
Chromium.
"""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.patience import PATIENCE_S, answered
from tests.processes import binary

# Scrollbars would reduce the width of 390 pixels; on telephones they overlay the page.
_FLAGS = (*("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"), "--hide-scrollbars")

# Name → code of the key, and the text it types.
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}


class Page:
    """Browser tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._num_calls = 0
        self.complaints: list[str] = []  # errors that the page wrote to its console or threw

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=url)

    async def look(self, *, width: int, dark: bool = False) -> None:
        """Sets the window's width, in CSS pixels, and the colour scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", features=[scheme])

    async def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression. Fails if it throws."""
        done = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        """Waits until the expression is true."""
        await answered(lambda: self.evaluate(expression))

    async def press(self, key: str) -> None:
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        await self._call("Input.dispatchKeyEvent", **event, **down)
        await self._call("Input.dispatchKeyEvent", **event, type="keyUp")

    async def write(self, text: str) -> None:
        """Types the text into the element that has the focus."""
        await self._call("Input.insertText", text=text)

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num_calls += 1
        call = {"id": self._num_calls, "method": method, "params": parameters}
        await self._socket.send_json(call)
        while True:
            said = await self._socket.receive_json(timeout=PATIENCE_S)
            if said.get("id") == self._num_calls:
                assert "error" not in said, f"{method}: {said['error']}"
                result: dict[str, Any] = said["result"]
                return result
            told = said.get("params", {})  # of an event
            is_error = told.get("entry", {}).get("level") == "error" or told.get("type") == "error"
            if is_error or said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told))


@contextlib.asynccontextmanager
async def page(url: str, folder: Path) -> AsyncIterator[Page]:
    """Opens a page in a browser that lives as long as the block. `folder`: for its profile."""
    with _browser(folder) as process:
        async with aiohttp.ClientSession() as session:
            port = await _debugging_port(process, folder)
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                [tab] = [each for each in await reply.json() if each["type"] == "page"]
            address = tab["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                opened = Page(socket)
                await opened.open(url)
                yield opened


@contextlib.contextmanager
def _browser(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [binary("chromium"), *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def _debugging_port(process: subprocess.Popen[bytes], folder: Path) -> int:
    """Returns the port that Chromium chose and wrote to a file."""
    written = folder / "DevToolsActivePort"
    async with asyncio.timeout(PATIENCE_S):
        while not written.exists() or not written.read_text().strip():
            assert process.poll() is None, (folder / "output").read_text()
            await asyncio.sleep(0.02)
    return int(written.read_text().split()[0])
