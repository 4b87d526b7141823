"""Main program of a contestant's process, which executes the driver's messages one at a time.

Messages are JSON lines over a separate socket, because libraries print. Does not know the contestants.
"""

import argparse
import importlib
import json
import select
import socket
import traceback
from typing import Any

import numpy as np

from benchmarks.transfer.contestant import Endpoint, Initiator, Target
from benchmarks.transfer.workload import POOL_BYTES, Load, differing_blocks, pattern


class ControlChannel:
    """Socket between process and driver, with one JSON value per line in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Returns the next message. Raises EOFError if the other side has closed the socket."""
        line = self._reader.readline()
        if not line:
            raise EOFError("the control connection is closed")
        message: dict[str, Any] = json.loads(line)
        return message

    def pending(self, timeout_s: float = 0) -> bool:
        return bool(select.select([self._connection], [], [], timeout_s)[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("target", "initiator"))
    parser.add_argument("module")
    parser.add_argument("prefix")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("control", type=int)
    arguments = parser.parse_args()
    control = ControlChannel(socket.socket(fileno=arguments.control))
    try:
        module = importlib.import_module(arguments.module)
        kind = getattr(module, arguments.prefix + arguments.role.capitalize())
        side: Endpoint = kind(arguments.options)
        control.send({"hello": side.hello()})
        _serve_messages(control, side)
    except EOFError:
        return
    except Exception as error:  # reported to the driver
        traceback.print_exc()
        control.send(_failure(error))


def _failure(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}


def _serve_messages(control: ControlChannel, side: Endpoint) -> None:
    while True:
        message = control.receive()
        if message["do"] == "close":
            side.close()
            control.send({})
            return
        try:
            control.send(_execute(control, side, **message) or {})
        except Exception as error:  # as above
            traceback.print_exc()
            control.send(_failure(error))


def _execute(control: ControlChannel, side: Endpoint, do: str, **arguments: Any) -> dict[str, Any] | None:
    if do == "connect":
        side.connect(arguments["other"])
    elif do == "fill":
        side.fill(pattern())
    elif do == "blank":
        side.fill(np.zeros(POOL_BYTES, np.uint8))
    elif do == "compare":
        return {"differing": differing_blocks(side.landed(), Load(**arguments["load"]))}
    elif do == "serve" and isinstance(side, Target):
        control.send({})
        _serve(control, side, Load(**arguments["load"]), arguments["mode"])
    elif isinstance(side, Initiator):
        return _initiate(side, do, arguments)
    return None


def _serve(control: ControlChannel, side: Target, load: Load, mode: str) -> None:
    """Serves until "stop". "serve" is already answered; "stop" is answered after serving has ended."""
    try:
        side.serve(load, mode, control.pending)
    finally:
        control.receive()


def _initiate(side: Initiator, do: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    if do == "prepare":
        side.prepare(Load(**arguments["load"]), arguments["mode"])
    elif do == "run":
        return side.run(arguments["min_s"])
    elif do == "latencies":
        return {"latencies": side.latencies()}
    elif do == "done":
        side.done()
    return None


if __name__ == "__main__":
    main()
