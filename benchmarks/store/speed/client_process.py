"""Main program of a client process, which executes the driver's messages one at a time. Does not know the stores."""

import argparse
import importlib
import json
import socket
import traceback
from typing import Any

from benchmarks.store.speed import workload
from benchmarks.store.speed.client import PreparedLoad, StoreClient, preload
from benchmarks.store.speed.workload import Load
from benchmarks.transfer.contestant_process import ControlChannel


class MessageHandler:
    def __init__(self, client: StoreClient) -> None:
        self._client = client
        workload.fill(client.pool)
        self._stocked: set[int] = set()
        self._works: dict[tuple[Load, str], PreparedLoad] = {}

    def do(self, do: str, **arguments: Any) -> dict[str, Any]:
        load = Load(**arguments["load"])
        if do == "modes":
            return {"modes": list(self._client.modes(load))}
        work = self._work(load, arguments["mode"])
        if do == "verify":
            return {"differing": work.verify()}
        return work.run(arguments["min_s"])

    def _work(self, load: Load, mode: str) -> PreparedLoad:
        if load.value_bytes not in self._stocked:
            preload(self._client, load)
            self._stocked.add(load.value_bytes)
        if (load, mode) not in self._works:
            self._works[load, mode] = PreparedLoad(self._client, load, mode)
        return self._works[load, mode]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", help="module:Class")
    parser.add_argument("facts", type=json.loads)
    parser.add_argument("options", type=json.loads)
    parser.add_argument("control", type=int)
    arguments = parser.parse_args()
    control = ControlChannel(socket.socket(fileno=arguments.control))
    try:
        module, _, name = arguments.kind.partition(":")
        client: StoreClient = getattr(importlib.import_module(module), name)(arguments.facts, arguments.options)
        side = MessageHandler(client)
        control.send({})
        _serve_messages(control, side)
        client.close()
        control.send({})
    except EOFError:
        return
    except Exception as error:  # reported to the driver
        _fail(control, error)


def _serve_messages(control: ControlChannel, side: MessageHandler) -> None:
    """Executes messages until "close"."""
    while (message := control.receive())["do"] != "close":
        try:
            control.send(side.do(**message))
        except Exception as error:  # as above
            _fail(control, error)


def _fail(control: ControlChannel, error: BaseException) -> None:
    traceback.print_exc()
    control.send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
