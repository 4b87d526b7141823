"""Other people's requests: what a cluster is busy with while a test looks at its own."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any, Self

import httpx2 as httpx

from tests.background import Background
from tests.e2e.cluster import Cluster
from tests.patience import PATIENCE_S


class BackgroundLoad(Background):
    """A number of sampled streams kept going: each thread starts a request as soon as its last one has ended. At the
    end of the `with` block the streams are dropped wherever they are, which the cluster sees as cancellations. With a
    pause of `pause_s` between requests, where life is wanted and no company in every batch."""

    def __init__(
        self,
        cluster: Cluster,
        vocab_size: int,
        *,
        streams: int = 8,
        seed: int = 0,
        pause_s: float = 0.0,
    ) -> None:
        self._flowing = [threading.Event() for _ in range(streams)]
        super().__init__(
            partial(self._go_on, f"{seed}-{index}", flowing)
            for index, flowing in enumerate(self._flowing)
        )
        self._cluster = cluster
        self._vocab_size = vocab_size
        self._pause_s = pause_s
        self.num_finished = 0

    def __enter__(self) -> Self:
        """Returns when every stream has had its first token."""
        super().__enter__()
        if not all(flowing.wait(PATIENCE_S) for flowing in self._flowing):
            self.stop()
            raise AssertionError(f"the load does not flow: {self.failures}\n{self._cluster.logs()}")
        return self

    def _go_on(self, name: str, flowing: threading.Event) -> None:
        dice = random.Random(name)
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

    def _stream(
        self, client: httpx.Client, request: dict[str, Any], flowing: threading.Event
    ) -> None:
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
