"""Clients of a cluster: a reader of one stream, and background clients that keep the cluster busy during a test."""

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import httpx2 as httpx

from tests.background import Background
from tests.e2e.cluster import GREEDY, Cluster, prompt_of, tokens_of
from tests.patience import PATIENCE_S

DONE = "data: [DONE]"


def object_schema(**properties: Any) -> dict[str, Any]:
    """Returns the JSON schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@dataclass(slots=True)
class Said:
    """Content that a client received for one choice, joined from its chunks."""

    text: str = ""
    arguments: str = ""  # of tool calls
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    request_ids: set[str] = field(default_factory=set)

    def add(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.request_ids.add(chunk["id"])
        (choice,) = chunk["choices"]
        delta = choice.get("delta") or {"content": choice.get("text")}
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            self.arguments += call["function"]["arguments"]
        self.token_ids += choice.get("token_ids") or ()
        self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
        self.reason = choice["finish_reason"] or self.reason


def read_choice(
    client: httpx.Client,
    body: dict[str, Any],
    on_tokens: Callable[[int], None] = lambda count: None,
    path: str = "/v1/completions",
) -> Said:
    """Reads a streamed reply of one choice, which must end well. `on_tokens` receives the number of tokens so far."""
    said, line = Said(), ""
    with client.stream("POST", path, json={**body, "stream": True, "return_token_ids": True}) as response:
        assert response.status_code == 200, response.read()
        for line in filter(None, response.iter_lines()):
            if line != DONE:
                said.add(json.loads(line.removeprefix("data: ")))
                on_tokens(len(said.token_ids))
    assert line == DONE
    return said


class BackgroundLoad(Background):
    """Keeps a number of sampled streams running. Each thread starts a request as soon as its last one has ended. The
    end of the `with` block drops the streams wherever they are, which the cluster sees as cancellations. `pause_s`
    separates requests, for tests that need some traffic but not in every batch."""

    def __init__(self, cluster: Cluster, vocab_size: int, *, streams: int, pause_s: float = 0.0) -> None:
        self._flowing = [threading.Event() for _ in range(streams)]
        super().__init__(partial(self._go_on, index, flowing) for index, flowing in enumerate(self._flowing))
        self._cluster = cluster
        self._vocab_size = vocab_size
        self._pause_s = pause_s
        self.num_finished = 0

    def __enter__(self) -> Self:
        """Returns when every stream has received its first token."""
        super().__enter__()
        if not all(flowing.wait(PATIENCE_S) for flowing in self._flowing):
            self.stop()
            raise AssertionError(f"the load does not flow: {self.failures}\n{self._cluster.logs()}")
        return self

    def _go_on(self, seed: int, flowing: threading.Event) -> None:
        dice = random.Random(seed)
        with self._cluster.client() as client:
            while not self.stopping.wait(self._pause_s):
                self._stream(client, self._request(dice), flowing)

    def _request(self, dice: random.Random) -> dict[str, Any]:
        return {
            "prompt": dice.choices(range(self._vocab_size), k=dice.randint(1, 200)),
            "max_tokens": dice.randint(8, 48),
            "temperature": dice.uniform(0.5, 1.5),
            "top_p": dice.choice((1.0, 0.9)),
            "ignore_eos": True,
            "stream": True,
        }

    def _stream(self, client: httpx.Client, request: dict[str, Any], flowing: threading.Event) -> None:
        with client.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if self.stopping.is_set():
                    return
                if line == "data: [DONE]":
                    break
                assert not line.startswith('data: {"error"'), line
                flowing.set()
        with self.lock:
            self.num_finished += 1


class Regulars(Background):
    """Clients that repeat the same requests without a pause, one prompt each, next to one that reads a long stream.
    Every answer must arrive and equal the answer before the block."""

    def __init__(self, cluster: Cluster, prompts: Sequence[list[int]], num_tokens: int, num_streamed: int) -> None:
        """`num_streamed`: number of tokens of the stream."""
        self._cluster = cluster
        self._num_tokens = num_tokens
        self._streamed = {"prompt": prompts[0], "max_tokens": num_streamed, **GREEDY}
        loops = [partial(self._ask_on, prompt, self._ask(prompt)) for prompt in prompts]
        super().__init__([*loops, partial(self._read_on, self._read())])
        self.begun_and_done: list[tuple[float, float]] = []  # of each short answer
        self.num_streams = 0  # complete streams read
        self._num_prompts = len(prompts)

    def __enter__(self) -> Self:
        """Returns when there are more answers than clients."""
        super().__enter__()
        self._cluster.wait_for("answers", lambda: len(self.begun_and_done) > self._num_prompts or self.failures)
        return self

    def wait_for_answers(self, began: float) -> None:
        """Waits for more answers than there are clients, to requests that started after `began`."""
        self._cluster.wait_for(
            "new answers", lambda: sum(begun > began for begun, _ in self.begun_and_done) > self._num_prompts
        )

    def _ask(self, prompt: list[int]) -> list[int]:
        return tokens_of(self._cluster.greedy(prompt, self._num_tokens))

    def _ask_on(self, prompt: list[int], right: list[int]) -> None:
        while True:
            begun = time.monotonic()
            assert self._ask(prompt) == right
            self.begun_and_done.append((begun, time.monotonic()))
            if self.stopping.is_set():
                return

    def _read(self) -> list[int]:
        with self._cluster.client() as client:
            return read_choice(client, self._streamed).token_ids

    def _read_on(self, right: list[int]) -> None:
        while not self.stopping.is_set():
            assert self._read() == right
            self.num_streams += 1


def busy(cluster: Cluster) -> Regulars:
    """Returns clients with short prompts, each with its expected answer already known."""
    return Regulars(cluster, [prompt_of(f"busy {number}", 40) for number in range(3)], 4, num_streamed=1500)
