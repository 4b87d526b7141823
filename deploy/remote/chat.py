"""`moonserve chat`: talk to the model; below each answer stands what it took.

Owns the conversation and the terminal. An answer is shown as it comes; Ctrl-C ends the answer, not the conversation,
and Ctrl-D, /quit or an empty pipe ends that.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from rich.console import Console

from deploy.remote.chat_stream import Reply, Said, ask
from deploy.terminal.endings import EXIT_USAGE, KEY_ENV, exit_code, explained
from deploy.terminal.gateway_view import add_url, fetch
from protocol.errors import MoonserveError, Unauthenticated

_PROMPT = "> "
# A model must not move the cursor, or worse: of control characters only tab and newline are shown.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C ends an answer"


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`argv`: the arguments after `chat`; words that are no options are the only thing that is asked."""
    try:
        arguments = _parser(environ).parse_args(argv)
    except SystemExit as exit:  # argparse has printed what is wrong, or the help
        return exit.code if isinstance(exit.code, int) else EXIT_USAGE
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lets `input` edit and remember lines
    try:
        chat = Chat(arguments, environ.get(KEY_ENV, ""))
        if arguments.prompt:
            chat.say(" ".join(arguments.prompt))
        else:
            chat.converse()
    except MoonserveError as error:
        print(f"moonserve chat: {explained(error)}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print()
    return 0


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
