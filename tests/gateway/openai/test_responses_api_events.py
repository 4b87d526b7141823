"""Events of a response: complete for any cuts in the text, one open item at a time, repeated in the last event."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.generation.events import Piece
from moonserve.gateway.openai.reply_format import ChatFormat, ReplyHeader, ReplyOptions
from moonserve.gateway.openai.responses_api_events import ResponseEvents
from moonserve.gateway.openai.responses_api_schema import ResponsesBody
from moonserve.gateway.openai.tool_call_grammar import ParsedChatFormat
from moonserve.gateway.text.reasoning import TAGS, ReasoningParser
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.gateway.text.tool_call_parsers import HermesParser
from moonserve.protocol.request import FinishReason, Logprobs, RequestId, Token

HEADER = ReplyHeader(id="resp_1", created=1, model="m")
BODY = ResponsesBody(input="hi")
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


class ScriptedChunks:
    """Chat chunks with the deltas that a test supplies."""

    def __init__(self, deltas: Sequence[dict[str, Any]], finish_reason: str) -> None:
        self._left = [*({"delta": delta} for delta in deltas), {"delta": {}}]
        self._left[-1]["finish_reason"] = finish_reason

    def choice(self, piece: Piece) -> dict[str, Any]:
        return self._left.pop(0)

    def detailed(self, usage: dict[str, Any]) -> dict[str, Any]:
        return usage


def parsed(text: str) -> list[dict]:
    """Parses events and checks that each event's name is its type."""
    found = []
    for event in text.split("\n\n")[:-1]:
        name, _, data = event.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def events_of(deltas: Sequence[dict[str, Any]], finish_reason: str = "stop") -> list[dict]:
    """Returns the stream of one response. Checks that the stored response and a whole reply equal its last event."""
    pieces = [Piece(index=0, text="", tokens=())] * (len(deltas) + 1)
    kept: list[dict[str, Any]] = []
    events, whole = (
        ResponseEvents(ScriptedChunks(deltas, finish_reason), HEADER, BODY, kept.append)  # type: ignore[arg-type]
        for _ in range(2)
    )
    text = events.first() + "".join(map(events.piece, pieces))
    emitted = parsed(text + events.usage(USAGE) + events.ending().decode())
    assert [event["sequence_number"] for event in emitted] == list(range(len(emitted)))
    assert [*kept, whole.whole_body(pieces, USAGE)] == [emitted[-1]["response"]] * 2
    return emitted


def of(kind: str, events: list[dict]) -> list[dict]:
    return [event for event in events if event["type"] == f"response.{kind}"]


def call(number: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    named = {"name": name} if name else {}
    head = {"id": f"call_{number}", "type": "function"} if name else {}
    function = {**named, "arguments": arguments}
    return {"tool_calls": [{"index": number, **head, "function": function}]}


@given(st.lists(st.text(min_size=1), max_size=8), st.sampled_from(["stop", "length"]))
def test_text_is_the_same_in_deltas_items_and_final_event(texts: list[str], reason: str) -> None:
    events = events_of([{"content": text} for text in texts], reason)
    text = "".join(texts)
    assert "".join(event["delta"] for event in of("output_text.delta", events)) == text
    [done] = of("output_item.done", events)
    assert done["item"]["content"][0]["text"] == text
    response = events[-1]["response"]
    assert response["output"] == [done["item"]]
    assert response["status"] == ("incomplete" if reason == "length" else "completed")
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["usage"]["total_tokens"] == 8
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]


_turns = st.lists(st.tuples(st.booleans(), st.lists(st.text(max_size=5), min_size=1, max_size=4)), max_size=5)


@given(_turns)
def test_only_one_item_is_open_at_a_time(turns: list[tuple[bool, list[str]]]) -> None:
    deltas: list[dict[str, Any]] = []
    for number, (is_call, parts) in enumerate(turns):
        if is_call:
            deltas.append(call(number, parts[0], name=f"f{number}"))
            deltas += [call(number, part) for part in parts[1:]]
        else:
            deltas += [{"content": part} for part in parts]
    events = events_of(deltas, "tool_calls" if any(is_call for is_call, _ in turns) else "stop")
    open_items: list[int] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert not open_items
            open_items.append(event["output_index"])
        elif event["type"] == "response.output_item.done":
            assert open_items.pop() == event["output_index"]
        elif event["type"].endswith(".delta"):
            assert [event["output_index"]] == open_items
    assert not open_items
    calls = [item for item in events[-1]["response"]["output"] if item["type"] == "function_call"]
    assert [item["arguments"] for item in calls] == ["".join(parts) for is_call, parts in turns if is_call]


def test_one_delta_can_end_a_call_add_text_and_begin_a_call() -> None:
    both = [*call(0, "}")["tool_calls"], *call(1, "{}", "g")["tool_calls"]]
    deltas = [call(0, "{", "f"), {"tool_calls": both, "content": "and"}]
    first, text, second = events_of(deltas)[-1]["response"]["output"]
    assert (first["arguments"], second["arguments"]) == ("{}", "{}")
    assert text["content"][0]["text"] == "and"


def test_logprobs_of_partial_characters_come_with_the_whole_character(tokenizer: Tokenizer) -> None:
    """Tokens that are part of a character have no text of their own; their log-probabilities come with the last one."""
    token_ids = tokenizer.encode("\U0001f389", add_special_tokens=False)
    assert len(token_ids) > 1
    options = ReplyOptions(usage=True, token_ids=False, logprobs=True)
    events = ResponseEvents(ChatFormat(HEADER, options, tokenizer, [()]), HEADER, BODY, lambda response: None)
    decoder, text = tokenizer.decoder(), ""
    for index, token_id in enumerate(token_ids):
        token = Token(request_id=RequestId("r"), index=index, token_id=token_id, logprobs=Logprobs(-0.5))
        text += events.piece(Piece(index=0, text=decoder.push(token_id), tokens=(token,)))
    [delta] = of("output_text.delta", parsed(text))
    spelled = [byte for entry in delta["logprobs"] for byte in entry["bytes"]]
    assert bytes(spelled).decode() == delta["delta"] == "\U0001f389"


def chat_format(options: ReplyOptions, tokenizer: Tokenizer, *, is_stream: bool) -> ParsedChatFormat:
    parser = ReasoningParser(TAGS[0], HermesParser(("w",), is_eager=is_stream))
    return ParsedChatFormat(HEADER, options, tokenizer, [()], [parser], shows_reasoning=True)


def test_the_reason_follows_a_call_in_a_chunk_of_its_own(tokenizer: Tokenizer) -> None:
    """The openai client ends a call by the reason in a later chunk; a client that lags gets both in one piece."""
    options = ReplyOptions(usage=False, token_ids=False, logprobs=False)
    chunks = chat_format(options, tokenizer, is_stream=True)
    text = '<tool_call>{"name": "w", "arguments": {}}</tool_call>'
    sent = chunks.piece(Piece(index=0, text=text, tokens=(), finish_reason=FinishReason.STOP))
    called, ended = (json.loads(each.removeprefix("data: "))["choices"][0] for each in sent.split("\n\n") if each)
    assert called["finish_reason"] is None
    assert called["delta"]["tool_calls"]
    assert (ended["delta"], ended["finish_reason"]) == ({}, "tool_calls")


def test_truncated_response_marks_only_its_last_item_incomplete(tokenizer: Tokenizer) -> None:
    """A response that is cut off has only its last item incomplete, streamed or not, for any cut in the text."""
    options = ReplyOptions(usage=True, token_ids=False, logprobs=False)
    text = '<think>I wonder.</think>I look.<tool_call>{"name": "w", "arguments": {"city": "Ul'
    for cut, is_stream in itertools.product(range(len(text)), (True, False)):
        pieces = [
            Piece(index=0, text=text[:cut], tokens=()),
            Piece(index=0, text=text[cut:], tokens=(), finish_reason=FinishReason.LENGTH),
        ]
        chunks = chat_format(options, tokenizer, is_stream=is_stream)
        response = ResponseEvents(chunks, HEADER, BODY, lambda ended: None).whole_body(pieces, USAGE)
        items = [(item["type"], item["status"]) for item in response["output"]]
        assert items == [("reasoning", "completed"), ("message", "completed"), ("function_call", "incomplete")]
        assert response["status"] == "incomplete"
