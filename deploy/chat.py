"""`moonserve chat`: a conversation with a served model. Answers go to stdout, their figures to stderr."""

import contextlib
import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from moonserve.deploy.terminal import EXIT_OK, KEY_ENV, add_url_option, error_text, fetch, open_reply, run
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.process.progress_bars import ProgressBars

_LONGEST_PAUSE_S = 600.0  # before and within an answer


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `chat`."""
    key = environ.get(KEY_ENV, "")

    def body(arguments: Namespace) -> int:
        model = arguments.model or fetch(arguments.url, "/v1/models", key)["data"][0]["id"]
        wish = {"model": model, "max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        wish |= {"stream": True, "stream_options": {"include_usage": True}}
        messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
        for question in [arguments.quick] if arguments.quick else _questions():
            asked = [*messages, {"role": "user", "content": question}]
            try:
                answer = _ask(arguments.url, key, {**wish, "messages": asked})
            except MoonserveError as error:
                if arguments.quick:
                    raise
                print(f"moonserve chat: {error_text(error)}; ask again", file=sys.stderr)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]
        return EXIT_OK

    return run(_parser(environ), argv, body)


def _questions() -> Iterator[str]:
    """Yields lines of stdin until its end or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then has a history and edits lines
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if question := input("> " if sys.stdin.isatty() else "").strip():
                yield question


def _ask(url: str, key: str, wish: Mapping[str, Any]) -> str:
    """Prints the answer as it arrives, until its end or Ctrl-C. Returns it."""
    stderr = Console(stderr=True, highlight=False)
    answer, usage, first_at, began_at = "", None, None, time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            with ProgressBars(lines=False) as progress, progress.busy("waiting for the first token"):
                reply = open_reply(url, "/v1/chat/completions", key, wish, timeout_s=_LONGEST_PAUSE_S)
                events = (json.loads(line[6:]) for line in stack.enter_context(reply) if line.startswith(b"data: {"))
                event = next(events, None)
            while event is not None:
                if "error" in event:
                    raise MoonserveError(event["error"]["message"])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    first_at = first_at or time.monotonic()
                    stderr.print(choice["delta"].get("reasoning_content") or "", style="dim", end="", markup=False)
                    answer += (text := choice["delta"].get("content") or "")
                    print(text, end="", flush=True)
                event = next(events, None)
    except KeyboardInterrupt:
        usage = None
    print()
    if usage is not None and first_at is not None:
        speed = (usage["completion_tokens"] - 1) / max(time.monotonic() - first_at, 1e-9)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        figures = f"first token after {first_at - began_at:.2f} s, then {speed:.0f} tokens/s"
        stderr.print(f"{figures}; {cached} of {usage['prompt_tokens']} prompt tokens cached", style="dim")
    return answer


def _parser(environ: Mapping[str, str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="moonserve chat",
        description="A conversation with the served model. Ctrl-C stops an answer, Ctrl-D ends the conversation.",
        epilog=f"The API key is read from {KEY_ENV}. Any OpenAI-compatible server will do.",
    )
    add_url_option(parser, environ)
    parser.add_argument("-q", "--quick", metavar="QUESTION", help="ask this and exit")
    parser.add_argument("--model", help="model to ask for; the server's first when not given")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, help="longest answer, tokens")
    parser.add_argument("--temperature", type=float, help="of sampling; 0 = the likeliest tokens")
    return parser
