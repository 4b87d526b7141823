"""Replies that are not streamed, and how parameters reach the workers."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from gateway.access.isolation import salt_of
from gateway.text.tokenizer import Tokenizer
from protocol.keys import block_keys, pack_keys, root_key, unpack_tokens
from protocol.wire import sampling_from_wire
from tests.gateway.conftest import post
from tests.gateway.scripted_cluster import BLOCK_SIZE, MAX_MODEL_LEN, ScriptedCluster

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


async def test_a_chat_completion_has_openais_form(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    async with http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "abc"}) as r:
        body = await r.json()
        assert r.headers["x-request-id"] == "abc"
        assert r.headers["x-prefill-instance-id"] == "prefill-0"
        assert r.headers["x-decode-instance-id"] == "decode-0"
    assert body["id"] == f"chatcmpl-{cluster.submissions[0].request_id}"
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == tokenizer.decode(cluster.tokens[:6])
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 6
    assert cluster.submissions[0].request_id.startswith("abc-")


async def test_the_prompt_is_the_chat_templates(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    await post(http, "/v1/chat/completions", CHAT | {"messages": messages})
    text = tokenizer.render_chat(CHAT["messages"])
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert unpack_tokens(cluster.submissions[0].token_ids) == expected


@pytest.mark.parametrize(
    ("prompt", "count"), [("hi", 1), (["hi", "ho"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)]
)
async def test_all_four_shapes_of_prompts_work(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, prompt: Any, count: int
) -> None:
    body = await post(http, "/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 2})
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
    total = sum(len(m.token_ids) // 4 for m in cluster.submissions)
    assert body["usage"]["prompt_tokens"] == total // 2  # each prompt counts once


async def test_parameters_reach_the_workers(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    counts = {"max_tokens": 9, "min_tokens": 2, "top_k": 7, "seed": 11, "logprobs": 3}
    shares = {"temperature": 0.5, "top_p": 0.75, "min_p": 0.25}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25}
    tokens = {"stop_token_ids": [77], "logit_bias": {"5": -100}}
    wish = {"prompt": "hi", **counts, **shares, **penalties, **tokens, "priority": -4}
    await post(http, "/v1/completions", wish)
    message = cluster.submissions[0]
    sampling = message.sampling
    counts["num_logprobs"] = counts.pop("logprobs")
    for name, value in {**counts, **shares, **penalties}.items():
        assert getattr(sampling, name) == value, name
    assert list(sampling.stop_token_ids) == [1, 4, 77]
    assert dict(sampling.logit_bias) == {5: -100.0}
    assert message.priority == -4
    assert cluster.places[0].priority == -4


async def test_defaults_are_openais(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    await post(http, "/v1/completions", {"prompt": "hi", "ignore_eos": True, "temperature": 0})
    sampling = cluster.submissions[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 0.0, 1.0)
    assert list(sampling.stop_token_ids) == []
    assert not sampling.HasField("num_logprobs")
    body = await post(http, "/v1/chat/completions", {"messages": CHAT["messages"], "stop": " be"})
    room = MAX_MODEL_LEN - body["usage"]["prompt_tokens"]
    assert cluster.submissions[1].sampling.max_tokens == room


async def test_the_placement_request_carries_salted_keys_and_targets(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    ids = list(range(10, 10 + 2 * BLOCK_SIZE + 1))
    body = {"prompt": ids, "max_tokens": 3, "cache_salt": "tenant", "user": "u"}
    headers = {"x-slo-ttft-ms": "500", "x-slo-tbt-ms": "25"}
    async with http.post("/v1/completions", json=body, headers=headers) as reply:
        assert reply.status == 200
    place = cluster.places[0]
    assert place.block_keys == pack_keys(
        block_keys(root_key("f00d", salt_of(None, "tenant")), ids, BLOCK_SIZE)
    )
    assert cluster.submissions[0].block_keys == place.block_keys
    assert (place.num_prompt_tokens, place.max_tokens, place.tenant) == (len(ids), 3, "u")
    assert (place.ttft_slo_s, place.tbt_slo_s) == (0.5, 0.025)


async def test_an_end_token_stops_without_text(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    cluster.tokens[3] = 4  # <|im_end|>
    body = await post(http, "/v1/chat/completions", CHAT | {"return_token_ids": True})
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == tokenizer.decode(cluster.tokens[:3])
    assert choice["token_ids"] == cluster.tokens[:4]
    assert body["prompt_token_ids"]


async def test_tokenize_and_detokenize_are_inverse(
    http: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    body = await post(http, "/tokenize", {"prompt": "hello 日本", "return_token_strs": True})
    assert body["tokens"] == tokenizer.encode("hello 日本")
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == MAX_MODEL_LEN
    assert len(body["token_strs"]) == body["count"]
    text = await post(http, "/detokenize", {"tokens": body["tokens"]})
    assert text == {"prompt": "<|bos|>hello 日本"}
    chat = await post(http, "/tokenize", {"messages": CHAT["messages"]})
    expected = tokenizer.render_chat(CHAT["messages"])
    assert chat["tokens"] == tokenizer.encode(expected, add_special_tokens=False)


async def test_bad_words_reach_the_workers_alone_and_behind_a_space(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    wish = {"prompt": "to be", "max_tokens": 2}
    for words in (["Romeo", " Romeo", "z"], [], None):
        await post(http, "/v1/completions", {**wish, "bad_words": words})
    expected = dict.fromkeys(
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for text in ("Romeo", " Romeo", "z", " z")
    )
    found = [sampling_from_wire(each.sampling).bad_words for each in cluster.submissions]
    assert found == [tuple(expected), (), ()]
