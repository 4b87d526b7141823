"""Which answers a client gets of those that are drawn, and which words none of them has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.events import Piece
from gateway.openai.sampling import best
from gateway.text.tokenizer import Tokenizer
from protocol.ids import RequestId
from protocol.request import FinishReason, Logprobs, Token
from protocol.wire import sampling_from_wire
from tests.gateway.conftest import post
from tests.gateway.scripted_cluster import Run, ScriptedCluster

PATH = "/v1/completions"
ASK: dict[str, Any] = {"prompt": "to be", "max_tokens": 2, "seed": 7}


def answer(index: int, logprobs: list[float]) -> list[Piece]:
    """A token per piece."""
    return [
        Piece(
            index=index,
            text="",
            tokens=(
                Token(
                    request_id=RequestId("r"),
                    index=at,
                    token_id=index,
                    logprobs=Logprobs(each),
                    finish_reason=FinishReason.LENGTH,
                ),
            ),
        )
        for at, each in enumerate(logprobs)
    ]


SCORES = st.lists(st.floats(-9.0, 0.0), min_size=1, max_size=4)


@given(
    drawn=st.lists(st.lists(SCORES, min_size=3, max_size=3), min_size=1, max_size=3),
    num_kept=st.integers(1, 3),
)
def test_those_of_the_greatest_cumulative_logprob_are_kept_best_first(
    drawn: list[list[list[float]]], num_kept: int
) -> None:
    """Of each prompt its own."""
    flat = [scores for of_prompt in drawn for scores in of_prompt]
    choices = [answer(index, scores) for index, scores in enumerate(flat)]
    kept = best(choices, num_drawn=3, num_kept=num_kept)
    for number in range(len(drawn)):
        own = kept[number * num_kept : (number + 1) * num_kept]
        ids = [pieces[0].tokens[0].token_id for pieces in own]
        assert all(number * 3 <= each < number * 3 + 3 for each in ids)
        sums = [sum(flat[each]) for each in ids]
        of_all = [sum(scores) for scores in drawn[number]]
        if num_kept < 3:
            assert sums == sorted(of_all, reverse=True)[:num_kept]
        else:
            assert ids == [number * 3, number * 3 + 1, number * 3 + 2]


async def test_best_of_draws_more_than_it_gives(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    """The one with seed 9 is likeliest; all that was drawn is paid for."""

    async def play(run: Run) -> None:
        seed = run.message.sampling.seed
        for index in range(2):
            token = run.token(index, 100 + seed)
            token = replace(token, logprobs=Logprobs(-1.0 - abs(seed - 9) + 0.25 * index))
            run.prefill.streams.send(run.gateway_id, tokens=[token])

    cluster.scripts += [play] * 4
    body = await post(http, PATH, {**ASK, "best_of": 4, "n": 2})
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == tokenizer.decode([109, 109])
    assert texts[1] in (tokenizer.decode([108, 108]), tokenizer.decode([110, 110]))
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 8


async def test_best_of_without_more_than_n_changes_nothing(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    body = await post(http, PATH, {**ASK, "best_of": 2, "n": 2})
    assert len(body["choices"]) == len(cluster.submissions) == 2
    assert not cluster.submissions[0].sampling.HasField("num_logprobs")


@pytest.mark.parametrize("words", [None, []])
async def test_no_bad_words_are_none(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, words: list[str] | None
) -> None:
    await post(http, PATH, {**ASK, "bad_words": words})
    assert not cluster.submissions[0].sampling.bad_words


async def test_bad_words_reach_the_workers_alone_and_behind_a_space(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    await post(http, PATH, {**ASK, "bad_words": ["Romeo", " Romeo", "z"]})
    expected = dict.fromkeys(
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in ("Romeo", " Romeo", "z", " z")
    )
    assert sampling_from_wire(cluster.submissions[0].sampling).bad_words == tuple(expected)
