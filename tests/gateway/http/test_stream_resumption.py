"""A broken stream resumes at the client's position, at any gateway, with the output that it would have had."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.errors import ApiError
from moonserve.gateway.generation.events import Choice
from moonserve.gateway.http.stream_resumption import EventId, digest_of, parse_event_id
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.request import SamplingParams
from tests.gateway.conftest import CHAT_PATH, TEXT_PATH, ReplyContent, content_by_choice, refused, running_gateway
from tests.gateway.scripted_cluster import Run, ScriptedCluster

COMMON: dict[str, Any] = {
    "stream": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "include_event_ids": True},
}
CHAT = COMMON | {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
TEXT = COMMON | {"prompt": "hello", "max_tokens": 8}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ghent"}}\n</tool_call>'

EVENT_IDS = st.builds(
    EventId,
    response_id=st.from_regex(r"[A-Za-z0-9._:/+=@-]{1,192}", fullmatch=True),
    created=st.integers(0, 10**12 - 1),
    seed=st.integers(0, 2**64 - 1),
    digest=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    num_tokens=st.lists(st.integers(0, 10**10 - 1), min_size=1, max_size=128).map(tuple),
)


@given(EVENT_IDS)
def test_event_id_round_trips(event_id: EventId) -> None:
    assert parse_event_id(str(event_id)) == event_id


@given(st.text(max_size=80), EVENT_IDS, st.integers(0, 200))
def test_other_event_ids_are_refused(text: str, event_id: EventId, place: int) -> None:
    """Any text is refused, also one that starts like a valid id."""
    for wrong in (text, f"{str(event_id)[:place]} {text}"):
        with pytest.raises(ApiError) as caught:
            parse_event_id(wrong)
        assert (caught.value.status, caught.value.param) == (400, "Last-Event-ID")


@given(st.permutations([3, 300, 70_000, 2**31]))
def test_digest_depends_on_values_not_on_construction_order(stops: list[int]) -> None:
    """Equal requests have equal digests, although another process may order its sets differently."""
    made = _choice(SamplingParams(max_tokens=4, stop_token_ids=frozenset(stops)))
    same = _choice(SamplingParams(max_tokens=4, stop_token_ids=frozenset(sorted(stops))))
    assert digest_of([made], "f00d") == digest_of([same], "f00d")
    assert digest_of([made], "f00d") != digest_of([made], "beef")
    assert digest_of([made], "f00d") != digest_of([replace(made, token_ids=(1, 2))], "f00d")


def known_digest() -> str:
    return digest_of([_choice(SamplingParams(max_tokens=4, grammar="any", bad_words=((1, 2),)))], "f00d")


def test_digest_is_the_same_in_another_process() -> None:
    """The successor of a killed gateway accepts its events: no hash of a string and no address is in the digest."""
    code = f"from {__name__} import known_digest; print(known_digest())"
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == known_digest()


def _choice(sampling: SamplingParams) -> Choice:
    return Choice(index=0, token_ids=(1, 2, 3), sampling=sampling)


class Event(NamedTuple):
    event_id: str  # "" = it has none
    data: dict[str, Any]


def contents_of(events: list[Event]) -> dict[int, ReplyContent]:
    return content_by_choice(event.data for event in events)


async def read(
    http: aiohttp.ClientSession,
    path: str,
    body: dict[str, Any],
    last: str = "",
    on_event: Callable[[int], None] = lambda choice: None,
) -> list[Event]:
    """Returns the events of a stream that ends well, without [DONE]. `on_event` receives the choice of each event that
    has an id."""
    headers = {"Last-Event-ID": last} if last else {}
    events: list[Event] = []
    fields: dict[str, str] = {}
    async with http.post(path, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            fields[name] = value
            if name == "data" and value != "[DONE]":
                events.append(Event(fields.pop("id", ""), json.loads(value)))
                if events[-1].event_id:
                    on_event(events[-1].data["choices"][0]["index"])
    assert fields["data"] == "[DONE]"
    return events


async def check_every_break(
    cluster: ScriptedCluster, path: str, body: dict[str, Any], **options: object
) -> list[Event]:
    """Checks that a second gateway completes the stream after every event. The first run sends one token per event."""
    num_choices = body.get("n", 1)
    # One per choice: the script goes on with a choice after its stop string and would take turns of other choices.
    read_by_client = [asyncio.Semaphore(0) for _ in range(num_choices)]

    async def in_turn(run: Run) -> None:
        token = run.prefill_done()
        _, _, choice = run.message.request_id.partition(".")  # the first choice has the request's id
        while token.finish_reason is None:
            await read_by_client[int(choice or 0)].acquire()
            token = run.token(token.index + 1)
            run.decoded(token)

    cluster.scripts = [in_turn] * num_choices
    async with (
        running_gateway(cluster, **options) as one,
        running_gateway(cluster, **options) as other,
        aiohttp.ClientSession(one) as http,
        aiohttp.ClientSession(other) as http_of_other,
    ):
        whole = await read(http, path, body, on_event=lambda n: read_by_client[n].release())
        seeds = {message.sampling.seed for message in cluster.submissions}
        marked = [place for place, event in enumerate(whole) if event.event_id]
        assert len(marked) > 4
        for place in marked:
            rest = await read(http_of_other, path, body, whole[place].event_id)
            assert contents_of(whole[: place + 1] + rest) == contents_of(whole)
            names = {(event.data["id"], event.data["created"]) for event in whole + rest}
            assert len(names) == 1
            assert rest[-1].data["usage"] == whole[-1].data["usage"]
        assert {message.sampling.seed for message in cluster.submissions} == seeds
    return whole


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
        (TEXT_PATH, TEXT | {"max_tokens": 12, "echo": True}),
        (TEXT_PATH, TEXT | {"max_tokens": 12, "echo": True, "logprobs": 1}),
        (TEXT_PATH, TEXT | {"max_tokens": 12, "stop": "or no", "n": 2, "logprobs": 1}),
    ],
)
async def test_stream_resumes_from_any_event(cluster: ScriptedCluster, path: str, body: dict[str, Any]) -> None:
    await check_every_break(cluster, path, body)


async def test_resumed_stream_keeps_characters_of_several_tokens(
    cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    cluster.tokens = tokenizer.encode("日本🎉 ja", add_special_tokens=False)
    body = TEXT | {"max_tokens": len(cluster.tokens)}
    whole = await check_every_break(cluster, TEXT_PATH, body)
    assert contents_of(whole)[0].text == "日本🎉 ja"


async def test_tool_call_resumes_within_its_arguments(cluster: ScriptedCluster, tokenizer: Tokenizer) -> None:
    cluster.tokens = [*tokenizer.encode(CALL, add_special_tokens=False), *tokenizer.eos_token_ids]
    whole = await check_every_break(
        cluster, CHAT_PATH, CHAT | {"tools": [WEATHER], "max_tokens": 99}, tool_call_parser="hermes"
    )
    (only,) = contents_of(whole).values()
    assert (only.names, only.reason) == (("weather",), "tool_calls")
    assert json.loads(only.arguments) == {"city": "Ghent"}


async def test_event_ids_are_optional_and_unresumable_requests_are_refused(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    unmarked = TEXT | {"stream_options": {"include_usage": True}}
    assert not any(event.event_id for event in await read(http, TEXT_PATH, unmarked))
    last = next(e.event_id for e in await read(http, TEXT_PATH, TEXT) if e.event_id)
    response = {"input": "hello", "stream": True}
    for path, body, event_id in [
        (TEXT_PATH, TEXT, "17"),
        (TEXT_PATH, TEXT | {"prompt": "hallo"}, last),
        (TEXT_PATH, TEXT | {"temperature": 0.5}, last),
        (TEXT_PATH, TEXT | {"n": 2}, last),
        ("/v1/responses", response, last),
    ]:
        error = await refused(http, path, 400, json=body, headers={"Last-Event-ID": event_id})
        assert error["param"] == "Last-Event-ID"
