"""One streamed chat completion and what it took, as its client measures it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deploy.terminal.gateway_view import NO_ANSWER, headers_for, no_answer, refused
from protocol.errors import MoonserveError

_TIMEOUT_S = 600.0  # of silence; as long as a gateway lets a request take


@dataclass(frozen=True, slots=True)
class Said:
    """One turn, as the API has it."""

    role: str
    content: str


@dataclass(slots=True, eq=False)
class Reply:
    """Filled while the answer comes. Instants are monotonic seconds of this process."""

    asked_at: float = 0.0
    chunk_at: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def summary(self) -> str:
        """TTFT, TBT and cached tokens, as far as they are known."""
        words = []
        if self.chunk_at:
            words.append(f"TTFT {(self.chunk_at[0] - self.asked_at) * 1e3:.0f} ms")
        output = self.usage.get("completion_tokens", len(self.chunk_at))
        if len(self.chunk_at) > 1 and output > 1:
            tbt_s = (self.chunk_at[-1] - self.chunk_at[0]) / (output - 1)
            words.append(f"TBT {tbt_s * 1e3:.1f} ms")
        words.append(f"{output} tokens")
        if self.usage:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            words.append(f"{cached} of {self.usage['prompt_tokens']} prompt tokens cached")
        return " · ".join(words)


def ask(
    url: str,
    api_key: str,
    model: str,
    said: Sequence[Said],
    parameters: Mapping[str, Any],
    reply: Reply,
) -> Iterator[str]:
    """The answer's text as it comes; `reply` knows the rest. Blocks. Raises MoonserveError; whoever stops reading ends
    the request in the cluster, too."""
    body = {
        "model": model,
        "messages": [asdict(each) for each in said],
        "stream": True,
        "stream_options": {"include_usage": True},
        **parameters,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={**headers_for(api_key), "content-type": "application/json"},
    )
    reply.asked_at = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield from _taken(json.loads(line[len(b"data: ") :]), reply)
    except urllib.error.HTTPError as error:
        with error:
            raise refused(url, error) from error
    except NO_ANSWER as error:
        raise no_answer(url, error) from error


def _taken(chunk: Mapping[str, Any], reply: Reply) -> Iterator[str]:
    """New text in a chunk. Raises MoonserveError for one that is an error."""
    if "error" in chunk:
        raise MoonserveError(str(chunk["error"]["message"]))
    if chunk.get("usage"):
        reply.usage = chunk["usage"]
    for choice in chunk.get("choices", ()):
        text = choice["delta"].get("content")
        if text:
            reply.chunk_at.append(time.monotonic())
            reply.pieces.append(text)
            yield text
