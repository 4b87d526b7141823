"""`moonserve chat`: talk to the model; below each answer stands what it took.

An answer is shown as it comes; Ctrl-C ends the answer, not the conversation, and Ctrl-D, /quit or an empty pipe ends
that.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from deploy.terminal.client import EXIT_OK, KEY_ENV, add_url, fetch, opened, run
from protocol.errors import MoonserveError, Unauthenticated

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
    reply.asked_at = time.monotonic()
    path = "/v1/chat/completions"
    with opened(url, path, api_key, timeout_s=_TIMEOUT_S, body=body) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield from _taken(json.loads(line[len(b"data: ") :]), reply)


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


_PROMPT = "> "
# A model must not move the cursor, or worse: of control characters only tab and newline are shown.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C ends an answer"


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `chat`; words that are no options are the only thing that is asked."""

    def body(arguments: Namespace) -> int:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lets `input` edit and remember lines
        try:
            chat = Chat(arguments, environ.get(KEY_ENV, ""))
            if arguments.prompt:
                chat.say(" ".join(arguments.prompt))
            else:
                chat.converse()
        except KeyboardInterrupt:
            print()
        return EXIT_OK

    return run(_parser(environ), argv, body)


class Chat:
    """One conversation."""

    def __init__(self, arguments: Namespace, key: str) -> None:
        """Raises MoonserveError where the gateway does not answer."""
        self._url, self._key = arguments.url, key
        self._parameters = {
            name: value
            for name in ("max_tokens", "temperature", "seed")
            if (value := getattr(arguments, name)) is not None
        }
        self._model = arguments.model or fetch(self._url, "/v1/models", key)["data"][0]["id"]
        self._system = [Said("system", arguments.system)] if arguments.system else []
        self._said: list[Said] = list(self._system)
        self._console = Console(highlight=False, soft_wrap=True)

    def converse(self) -> None:
        """Until the end of the input."""
        self._console.print(f"{self._model} at {self._url}; {_HELP}", style="dim", markup=False)
        while True:
            try:
                line = input(_PROMPT).strip()
            except EOFError:
                self._console.print()
                return
            match line:
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/reset":
                    self._said = list(self._system)
                    self._console.print("forgotten", style="dim")
                case _ if line.startswith("/"):
                    self._console.print(_HELP, style="dim", markup=False)
                case _:
                    self._try(line)

    def say(self, text: str) -> None:
        """One question and its answer. Raises MoonserveError; what was not answered is forgotten."""
        asked = [*self._said, Said("user", text)]
        reply = Reply()
        try:
            for piece in ask(self._url, self._key, self._model, asked, self._parameters, reply):
                self._console.file.write(piece.translate(_CONTROLS))
                self._console.file.flush()
        finally:
            self._console.print()
        self._said = [*asked, Said("assistant", reply.text)]
        self._console.print(reply.summary(), style="dim", markup=False)

    def _try(self, line: str) -> None:
        try:
            self.say(line)
        except KeyboardInterrupt:
            self._console.print("stopped", style="dim")
        except Unauthenticated:
            raise
        except MoonserveError as error:
            self._console.print(str(error), style="red", markup=False)


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve chat",
        description="Talks to the model; each answer comes with its TTFT, TBT and cached tokens.",
        epilog=f"The API key is read from {KEY_ENV}. exit codes: 0 said; 2 usage or wrong key; 3 no gateway answers",
    )
    parser.add_argument("prompt", nargs="*", help="ask this alone, and end")
    add_url(parser, environ)
    parser.add_argument("--model", help="the first that is served when not given")
    parser.add_argument("--system", help="what the model is told before everything else")
    parser.add_argument("--max-tokens", type=int, help="of each answer")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    return parser
