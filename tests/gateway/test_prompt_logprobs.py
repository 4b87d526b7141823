"""Log-probabilities of a prompt's own tokens: in vLLM's form beside an answer, in OpenAI's before it, found once."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import numpy as np
import pytest

from gateway.openai.logprobs import completion_logprobs, echoed_logprobs
from gateway.text.tokenizer import Tokenizer
from protocol.errors import IntegrityError, PeerLost
from protocol.ids import RequestId
from protocol.prompt_logprobs import FLOAT, UINT, PromptLogprobs
from protocol.request import Logprobs, Token
from tests.gateway.conftest import post
from tests.gateway.scripted_cluster import BLOCK_SIZE, Run, ScriptedCluster

PATH = "/v1/completions"
PROMPT = "to be or not to be"
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}


async def test_a_completion_has_them_as_vllm_does(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    """The first token's are null; the token's own are there, whether or not it is among the likeliest."""
    prompt = [70, 1, 80, 0]  # the scripted worker finds tokens 0 and 1 likeliest everywhere
    body = await post(http, PATH, {**ASK, "prompt": prompt, "prompt_logprobs": 2})
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in others] == [["1", "0"], ["80", "0", "1"], ["0", "1"]]
    assert others[1] == {
        "80": {"logprob": -2.0, "rank": 3, "decoded_token": tokenizer.token_name(80)},
        "0": {"logprob": -3.0, "rank": 1, "decoded_token": tokenizer.token_name(0)},
        "1": {"logprob": -4.0, "rank": 2, "decoded_token": tokenizer.token_name(1)},
    }
    assert cluster.submissions[0].sampling.num_prompt_logprobs == 2
    assert body["choices"][0]["logprobs"] is None


async def test_a_chat_has_them_beside_its_choices(http: aiohttp.ClientSession) -> None:
    wish = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "n": 2}
    body = await post(http, "/v1/chat/completions", {**wish, "prompt_logprobs": 0})
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert [len(entry) for entry in others] == [1] * (body["usage"]["prompt_tokens"] - 1)


async def test_an_echoed_prompt_has_them_before_the_answers_own(
    http: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    body = await post(http, PATH, {**ASK, "echo": True, "logprobs": 2})
    [choice] = body["choices"]
    ids = tokenizer.encode(PROMPT)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert logprobs["tokens"][: len(ids)] == [tokenizer.token_name(each) for each in ids]
    assert logprobs["token_logprobs"][: len(ids) + 1] == [None, *(-float(at) for at in range(1, len(ids))), -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {
        tokenizer.token_name(0): -2.0,
        tokenizer.token_name(1): -3.0,
        tokenizer.token_name(ids[1]): -1.0,
    }
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][len(ids)] == len(PROMPT)
    assert {len(column) for column in logprobs.values()} == {len(ids) + 3}


def test_a_token_that_is_not_among_the_likeliest_is_told_of_beside_them(tokenizer: Tokenizer) -> None:
    """As OpenAI's clients expect: k + 1 entries, or k where it is one of them."""
    told = [
        Token(
            request_id=RequestId("r"),
            index=index,
            token_id=token_id,
            logprobs=Logprobs(sampled=sampled, top=((80, -0.5), (81, -1.0))),
        )
        for index, (token_id, sampled) in enumerate([(82, -2.0), (81, -1.0)])
    ]
    columns, _ = completion_logprobs(told, tokenizer, 0, skip_special_tokens=True)
    likeliest = {tokenizer.token_name(80): -0.5, tokenizer.token_name(81): -1.0}
    own = {tokenizer.token_name(82): -2.0}
    assert columns["top_logprobs"] == [likeliest | own, likeliest]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("h\u00e9\U0001f600 yes", ""),  # characters of several tokens
        ("<|bos|>twice<|bos|>", ""),  # somebody wrote them
        ("plain", "<|bos|>"),
    ],
)
def test_offsets_are_places_in_the_echoed_text(tokenizer: Tokenizer, prompt: str, before: str) -> None:
    ids = tokenizer.encode(before + prompt, add_special_tokens=False)
    behind = len(ids) - 1
    found = PromptLogprobs(
        logprobs=np.zeros(behind, FLOAT),
        ranks=np.ones(behind, UINT),
        top_ids=np.empty((behind, 0), UINT),
        top_logprobs=np.empty((behind, 0), FLOAT),
    )
    offsets = echoed_logprobs(ids, prompt, found, 0, tokenizer)["text_offset"]
    texts = (tokenizer.decode(ids[:n]).removeprefix(before) for n in range(len(ids)))
    assert offsets == [len(re.sub("\ufffd+$", "?", text)) for text in texts]


async def test_a_prompt_is_scored_once_for_all_its_choices_and_placed_as_new(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    """Short or long: the choices behind the first find its blocks, and are told what it found."""
    for length in (3, 2 * BLOCK_SIZE + 1):
        cluster.submissions.clear()
        cluster.places.clear()
        prompt = list(range(20, 20 + length))
        body = await post(http, PATH, {**ASK, "prompt": prompt, "n": 3, "prompt_logprobs": 1})
        wanted = [m.sampling.HasField("num_prompt_logprobs") for m in cluster.submissions]
        assert wanted == [True, False, False]
        keys = [len(place.block_keys) > 0 for place in cluster.places]
        assert keys == [False, length > BLOCK_SIZE, length > BLOCK_SIZE]
        told = [choice["prompt_logprobs"] for choice in body["choices"]]
        assert told[0] == told[1] == told[2]
        assert len(told[0]) == length


async def test_a_loss_before_the_first_token_scores_again_and_one_after_it_does_not(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    async def lost(run: Run) -> None:
        run.fail(IntegrityError("bad block"), run.prefill)  # no reason to wait for its return

    async def lost_later(run: Run) -> None:
        run.prefill_done(cluster.tokens[0])
        run.fail(PeerLost("gone"), run.decode)

    cluster.scripts += [lost, lost_later]
    prompt = [5] * (BLOCK_SIZE + 8)
    body = await post(http, PATH, {**ASK, "prompt": prompt, "prompt_logprobs": 1})
    told = body["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == body["usage"]["prompt_tokens"]
    assert len(cluster.submissions) == 3
    for place in cluster.places:
        goes_on = place.num_prompt_tokens > len(prompt)
        assert (len(place.block_keys) > 0) == goes_on
