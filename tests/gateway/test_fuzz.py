"""Robustness against any input: bodies are accepted or refused with 400, templates give text or are refused, and every
event that is sent is framed as one event with the intended content. No other exception is raised."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.gateway.errors import ApiError
from moonserve.gateway.generation.events import Piece
from moonserve.gateway.openai.reply_format import CompletionFormat, ReplyHeader, ReplyOptions
from moonserve.gateway.openai.request_schema import BodyParser, ChatBody, CompletionBody, validated
from moonserve.gateway.openai.responses_api_schema import ResponsesBody
from moonserve.gateway.served_model import DetokenizeBody, TokenizeBody
from moonserve.gateway.text.chat_template import ChatTemplate
from moonserve.gateway.text.tokenizer import load_tokenizer
from moonserve.protocol.errors import ConfigError, InvalidRequest
from tests.gateway.conftest import MODEL

TOKENIZER = load_tokenizer(MODEL)
BODIES = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, ResponsesBody)
NAMES = sorted({name for body in BODIES for name in body.model_fields} | {"guided_json", "n", "x"})

_leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "json_object", "user", "function", "-1", "\ud800", "\u2028"])
    | st.sampled_from(["message", "function_call", "function_call_output", "input_text"])
)
VALUES = st.recursive(
    _leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "function", "output", "call_id"]) | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
_bodies = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6)


_raw = _bodies.map(lambda body: json.dumps(body).encode("utf-8", "surrogatepass"))


@given(st.sampled_from(BODIES), _raw | st.binary(max_size=60))
def test_any_bytes_parse_or_get_400(cls: Any, raw: bytes) -> None:
    status = 200
    try:
        body = validated(cls, raw) if cls is ResponsesBody else BodyParser().parse(cls, raw)
        if isinstance(body, ResponsesBody):
            body.check()
    except ApiError as error:
        json.loads(json.dumps({"message": error.message, "param": error.param}))
        status = error.status
    assert status in (200, 400)


_messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id"]), VALUES), max_size=4
)
_parts = (
    *("{% for message in messages %}", "{{ message['content'] }}", "{{ message.content | tojson }}"),
    *("{{ messages[0].role.upper() }}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}"),
    *("{% generation %}", "{% endgeneration %}", "{% endfor %}", "{{ 10 ** 3 / 0 }}"),
    *("{{ namespace(a=1).a }}", "{{ strftime_now('%Y') }}", "{{ dict(a=1) }}", "text"),
)
_sources = st.lists(st.sampled_from(_parts), max_size=8).map("".join)


@given(_sources, _messages)
def test_any_template_renders_or_raises_invalid_request(source: str, messages: list[dict[str, Any]]) -> None:
    """The model's own template and any other either render to text or are refused."""
    for render in (TOKENIZER.template.render, lambda messages: ChatTemplate(source, {}).render(messages)):
        try:
            outcome = render(messages)
        except (ConfigError, InvalidRequest) as error:
            outcome = error.message
        assert isinstance(outcome, str)


@pytest.mark.parametrize("usage", [False, True])
@given(texts=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5))
def test_any_text_is_framed_as_one_event(usage: bool, texts: list[str]) -> None:
    """Every event is one ASCII line for any line splitter and holds one JSON object."""
    options = ReplyOptions(usage=usage, token_ids=False, logprobs=False)
    header = ReplyHeader(id="cmpl-\u2028\n", created=1, model="m\r\n\r\n")
    chunks = CompletionFormat(header, options, TOKENIZER, [()], [texts[0]])
    sent = chunks.first() + "".join(chunks.piece(Piece(index=0, text=text, tokens=())) for text in texts)
    assert sent.isascii()
    events = sent.split("\n\n")
    assert events.pop() == ""
    assert all(event.splitlines() == [event] for event in events)
    received = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert received == [texts[0], *texts]
