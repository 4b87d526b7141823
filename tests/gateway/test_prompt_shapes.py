"""What becomes of prompts before they are placed: cut to their end, or left open for the answer to go on."""

from __future__ import annotations

import aiohttp
import pytest

from gateway.openai.prompts import cut_behind
from gateway.openai.schema import ChatMessage
from gateway.text.tokenizer import Tokenizer
from protocol.keys import unpack_tokens
from tests.gateway.conftest import post
from tests.gateway.scripted_cluster import MAX_MODEL_LEN, ScriptedCluster

PROMPT = list(range(100, 160))
ASKED = [
    {"role": "user", "content": "Count."},
    {"role": "assistant", "content": "One, two, "},
]


async def placed(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, path: str, body: dict
) -> list[int]:
    """The prompt that workers got."""
    answer = await post(http, path, {"max_tokens": 2, **body})
    sent = cluster.submissions[-1]
    ids = unpack_tokens(sent.token_ids)[: sent.num_prompt_tokens]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    return list(ids)


@pytest.mark.parametrize(("wanted", "expected"), [(7, PROMPT[-7:]), (60, PROMPT), (99, PROMPT)])
async def test_a_prompt_is_cut_to_its_last_tokens(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, wanted: int, expected: list[int]
) -> None:
    body = {"prompt": PROMPT, "truncate_prompt_tokens": wanted}
    assert await placed(http, cluster, "/v1/completions", body) == expected


async def test_minus_one_cuts_to_what_the_context_holds_beside_the_answer(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    long = [7, *([100] * MAX_MODEL_LEN)]
    body = {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 12}
    assert await placed(http, cluster, "/v1/completions", body) == long[12 - MAX_MODEL_LEN :]


async def test_the_last_message_is_continued(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    body = {"messages": ASKED, "continue_final_message": True}
    prompt = tokenizer.decode(await placed(http, cluster, "/v1/chat/completions", body))
    assert prompt.rstrip().endswith("One, two,")


@pytest.mark.parametrize(
    ("rendered", "said", "expected"),
    [
        ("<a>One, two, <end>", "One, two, ", "<a>One, two, "),
        ("<a>One, two,<end>", "One, two, ", "<a>One, two,"),
        ("<u>x<end><a>x<end>", "x", "<u>x<end><a>x"),
        ("<a>x y<end>", "  x y", "<a>x y"),
    ],
)
def test_a_conversation_ends_with_what_was_said_last(
    rendered: str, said: str, expected: str
) -> None:
    assert cut_behind(rendered, ChatMessage(role="assistant", content=said)) == expected


async def test_a_stop_string_is_part_of_the_text_where_it_shall_be(
    http: aiohttp.ClientSession,
) -> None:
    """The script says: to be or not to be."""
    wish = {"prompt": PROMPT, "max_tokens": 9, "stop": " or"}
    texts = []
    for change in ({}, {"include_stop_str_in_output": True}):
        [choice] = (await post(http, "/v1/completions", wish | change))["choices"]
        assert choice["finish_reason"] == "stop"
        texts.append(choice["text"])
    assert texts == [" to be", " to be or"]
