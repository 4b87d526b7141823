"""Replies that are not streamed, the messages that reach conductor and workers, and prompt log-probabilities."""

import json
import re
from typing import Any

import aiohttp
import pytest

from moonserve.gateway.access.tenant_isolation import salt_of
from moonserve.gateway.openai.prompts import cut_after_message
from moonserve.gateway.openai.reply_format import completion_logprobs, echoed_logprobs
from moonserve.gateway.openai.request_schema import ChatMessage
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.errors import IntegrityError, PeerLost
from moonserve.protocol.kv_blocks import block_keys, pack_keys, root_key, unpack_tokens
from moonserve.protocol.request import Logprobs, RequestId, SamplingParams, Token
from moonserve.protocol.rpc.wire import sampling_from_wire
from tests.gateway.conftest import CHAT, CHAT_PATH, TEXT_PATH, get, post, refused
from tests.gateway.scripted_cluster import BLOCK_SIZE, MAX_MODEL_LEN, Run, ScriptedCluster, failing
from tests.scores import scores_of

PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
LONG = [7, *([100] * MAX_MODEL_LEN)]
STOPS = frozenset({1, 4})  # of the demo model


async def test_chat_completion_has_openais_form(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    """A chat's prompt is rendered by the chat template. An end token stops the answer and has no text."""
    cluster.tokens[3] = 4  # <|im_end|>
    body = CHAT | {"messages": PARTS, "return_token_ids": True}
    async with http.post(CHAT_PATH, json=body, headers={"X-Request-Id": "abc"}) as reply:
        body = await reply.json()
        assert reply.headers["x-request-id"] == "abc"
        assert reply.headers["x-prefill-instance-id"] == "prefill-0"
        assert reply.headers["x-decode-instance-id"] == "decode-0"
    assert cluster.submissions[0].request_id.startswith("abc-")
    assert body["id"] == f"chatcmpl-{cluster.submissions[0].request_id}"
    assert (body["object"], body["model"]) == ("chat.completion", "demo")
    (choice,) = body["choices"]
    text = tokenizer.decode(cluster.tokens[:3])
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", cluster.tokens[:4])
    assert body["usage"]["completion_tokens"] == 4
    rendered = tokenizer.template.render(CHAT["messages"])
    expected = tokenizer.encode(rendered, add_special_tokens=False)
    assert body["prompt_token_ids"] == expected
    assert unpack_tokens(cluster.submissions[0].token_ids) == expected
    tokenized = await post(http, "/tokenize", {"messages": CHAT["messages"]})
    assert tokenized["tokens"] == expected


async def test_all_four_forms_of_prompts_are_accepted(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    for prompt, count in (("hi", 1), (["hi", "ho"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)):
        cluster.submissions.clear()
        body = await post(http, TEXT_PATH, {"prompt": prompt, "n": 2, "max_tokens": 2})
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
        total = sum(len(m.token_ids) // 4 for m in cluster.submissions)
        assert body["usage"]["prompt_tokens"] == total // 2  # each prompt counts once


# Wishes of one name in the request's body and in the sampling parameters.
SAME = {
    **{"max_tokens": 9, "min_tokens": 2, "top_k": 7, "seed": 11, "temperature": 0.5, "top_p": 0.75, "min_p": 0.25},
    **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25},
}
# The request body, the prompt that workers receive (if the body has token ids), and the sampling parameters.
WISHES: list[tuple[dict[str, Any], list[int] | None, dict[str, Any]]] = [
    ({"prompt": "hi"}, None, {"max_tokens": 16, "stop_token_ids": STOPS}),
    ({"prompt": "hi", "ignore_eos": True, "temperature": 0}, None, {"max_tokens": 16, "temperature": 0.0}),
    (
        {"prompt": "hi", **SAME, "logprobs": 3, "stop_token_ids": [77], "logit_bias": {"5": -100}},
        None,
        {**SAME, "num_logprobs": 3, "stop_token_ids": STOPS | {77}, "logit_bias": {5: -100.0}},
    ),
    ({"prompt": LONG[:60], "truncate_prompt_tokens": 7}, LONG[53:60], {"max_tokens": 16}),
    ({"prompt": LONG[:60], "truncate_prompt_tokens": 60}, LONG[:60], {"max_tokens": 16}),
    (
        {"prompt": LONG, "truncate_prompt_tokens": -1, "max_tokens": 12},
        LONG[12 - MAX_MODEL_LEN :],
        {"max_tokens": 12},
    ),
]  # fmt: skip


async def test_parameters_reach_the_workers_with_openais_defaults(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    for body, prompt, expected in WISHES:
        await post(http, TEXT_PATH, body)
        sent = cluster.submissions[-1]
        sampling = sampling_from_wire(sent.sampling)
        defaults = {"seed": sampling.seed, "stop_token_ids": STOPS}
        if body.get("ignore_eos"):
            defaults["stop_token_ids"] = frozenset()
        assert sampling == SamplingParams(**{**defaults, **expected}), body
        assert prompt is None or list(unpack_tokens(sent.token_ids)) == prompt
    chat = await post(http, CHAT_PATH, {"messages": CHAT["messages"], "stop": " be"})
    room = MAX_MODEL_LEN - chat["usage"]["prompt_tokens"]
    assert cluster.submissions[-1].sampling.max_tokens == room
    for words in (["Romeo", " Romeo", "z"], [], None):
        await post(http, TEXT_PATH, {"prompt": "hi", "max_tokens": 2, "bad_words": words})
    spelled = ("Romeo", " Romeo", "z", " z")  # alone and after a space
    ids = dict.fromkeys(tuple(tokenizer.encode(s, add_special_tokens=False)) for s in spelled)
    found = [sampling_from_wire(each.sampling).bad_words for each in cluster.submissions[-3:]]
    assert found == [tuple(ids), (), ()]


async def test_placement_request_carries_salted_keys_targets_and_tenant(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    ids = list(range(10, 10 + 2 * BLOCK_SIZE + 1))
    body = {"prompt": ids, "max_tokens": 3, "cache_salt": "tenant", "user": "u", "priority": -4}
    headers = {"x-slo-ttft-ms": "500", "x-slo-tbt-ms": "25", "x-session-id": "tuesday"}
    await post(http, TEXT_PATH, body, **headers)
    place, submission = cluster.places[0], cluster.submissions[0]
    assert place.block_keys == pack_keys(block_keys(root_key("f00d", salt_of(None, "tenant")), ids, BLOCK_SIZE))
    assert submission.block_keys == place.block_keys
    assert (place.num_prompt_tokens, place.max_tokens, place.tenant) == (len(ids), 3, "u")
    assert (place.ttft_slo_s, place.tbt_slo_s, place.session_id) == (0.5, 0.025, "tuesday")
    assert place.priority == submission.priority == -4
    error = await refused(http, TEXT_PATH, 400, json=body, headers={"x-session-id": "x" * 300})
    assert error["param"] == "x-session-id"
    await post(http, TEXT_PATH, {**body, "prompt_cache_key": "friday"})
    assert cluster.places[-1].session_id == "friday"


async def test_last_message_is_continued(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    asked = [*CHAT["messages"], {"role": "assistant", "content": "One, two, "}]
    await post(http, CHAT_PATH, CHAT | {"messages": asked, "continue_final_message": True})
    prompt = tokenizer.decode(unpack_tokens(cluster.submissions[0].token_ids))
    assert prompt.rstrip().endswith("One, two,")
    for rendered, content, expected in (
        ("<a>One, two, <end>", "One, two, ", "<a>One, two, "),
        ("<a>One, two,<end>", "One, two, ", "<a>One, two,"),
        ("<u>x<end><a>x<end>", "x", "<u>x<end><a>x"),
        ("<a>x y<end>", "  x y", "<a>x y"),
    ):
        assert cut_after_message(rendered, ChatMessage(role="assistant", content=content)) == expected


@pytest.mark.parametrize(("change", "text"), [({}, " to be"), ({"include_stop_str_in_output": True}, " to be or")])
async def test_stop_string_is_included_on_request(
    http: aiohttp.ClientSession, change: dict[str, Any], text: str
) -> None:
    """`include_stop_str_in_output` keeps the stop string. The scripted output is "to be or not to be"."""
    request = {"prompt": "x", "max_tokens": 9, "stop": " or", **change}
    [choice] = (await post(http, TEXT_PATH, request))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")


async def test_models_are_listed_and_detokenize_inverts_tokenize(
    http: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    [card] = json.loads(await get(http, "/v1/models"))["data"]
    assert json.loads(await get(http, "/v1/models/demo")) == card
    assert (card["id"], card["max_model_len"], card["vocab_size"]) == ("demo", MAX_MODEL_LEN, 4096)
    body = await post(http, "/tokenize", {"prompt": "hello 日本", "return_token_strs": True})
    assert body["tokens"] == tokenizer.encode("hello 日本")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == MAX_MODEL_LEN
    text = await post(http, "/detokenize", {"tokens": body["tokens"]})
    assert text == {"prompt": "<|bos|>hello 日本"}


PROMPT = "to be or not to be"
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}


async def test_completion_has_prompt_logprobs_in_vllms_form(
    http: aiohttp.ClientSession, cluster: ScriptedCluster, tokenizer: Tokenizer
) -> None:
    """The first token's entry is null. Others include the token itself, whether or not it is among the likeliest."""
    prompt = [70, 1, 80, 0]  # the scripted worker finds tokens 0 and 1 likeliest everywhere
    body = await post(http, TEXT_PATH, {**ASK, "prompt": prompt, "prompt_logprobs": 2})
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


async def test_chat_has_prompt_logprobs_next_to_its_choices(http: aiohttp.ClientSession) -> None:
    body = await post(http, CHAT_PATH, CHAT | {"n": 2, "prompt_logprobs": 0})
    first, *others = body["prompt_logprobs"]
    assert first is None
    assert [len(entry) for entry in others] == [1] * (body["usage"]["prompt_tokens"] - 1)


async def test_echoed_prompt_has_logprobs_before_those_of_the_output(
    http: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    body = await post(http, TEXT_PATH, {**ASK, "echo": True, "logprobs": 2})
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


def test_sampled_token_outside_the_likeliest_is_added(tokenizer: Tokenizer) -> None:
    """There are k + 1 top log-probabilities, or k if the token is among the likeliest, as OpenAI's clients expect."""
    tokens = [
        Token(
            request_id=RequestId("r"),
            index=index,
            token_id=token_id,
            logprobs=Logprobs(sampled=sampled, top=((80, -0.5), (81, -1.0))),
        )
        for index, (token_id, sampled) in enumerate([(82, -2.0), (81, -1.0)])
    ]
    columns, _ = completion_logprobs(tokens, tokenizer, 0, skip_special_tokens=True)
    likeliest = {tokenizer.token_name(80): -0.5, tokenizer.token_name(81): -1.0}
    own = {tokenizer.token_name(82): -2.0}
    assert columns["top_logprobs"] == [likeliest | own, likeliest]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("h\u00e9\U0001f600 yes", ""),  # characters of several tokens
        ("<|bos|>twice<|bos|>", ""),  # written in the prompt by the client
        ("plain", "<|bos|>"),
    ],
)
def test_text_offsets_are_positions_in_the_echoed_text(tokenizer: Tokenizer, prompt: str, before: str) -> None:
    ids = tokenizer.encode(before + prompt, add_special_tokens=False)
    offsets = echoed_logprobs(ids, prompt, scores_of(range(1, len(ids)), 0), 0, tokenizer)["text_offset"]
    texts = (tokenizer.decode(ids[:n]).removeprefix(before) for n in range(len(ids)))
    assert offsets == [len(re.sub("\ufffd+$", "?", text)) for text in texts]


async def test_prompt_is_scored_once_for_all_choices_without_cached_blocks(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    """One choice computes the prompt's scores; the others reuse its blocks (if the prompt has any) and its scores."""
    for length in (3, 2 * BLOCK_SIZE + 1):
        cluster.submissions.clear()
        cluster.places.clear()
        prompt = list(range(20, 20 + length))
        body = await post(http, TEXT_PATH, {**ASK, "prompt": prompt, "n": 3, "prompt_logprobs": 1})
        wanted = [m.sampling.HasField("num_prompt_logprobs") for m in cluster.submissions]
        assert wanted == [True, False, False]
        keys = [len(place.block_keys) > 0 for place in cluster.places]
        assert keys == [False, length > BLOCK_SIZE, length > BLOCK_SIZE]
        scores = [choice["prompt_logprobs"] for choice in body["choices"]]
        assert scores[0] == scores[1] == scores[2]
        assert len(scores[0]) == length


async def test_prompt_is_scored_again_only_after_a_loss_before_the_first_token(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    async def lost_later(run: Run) -> None:
        run.prefill_done()
        run.fail(PeerLost("gone"), run.decode)

    # After bad bytes the gateway does not wait for the worker's return.
    cluster.scripts += [failing(IntegrityError("bad block")), lost_later]
    prompt = [5] * (BLOCK_SIZE + 8)
    body = await post(http, TEXT_PATH, {**ASK, "prompt": prompt, "prompt_logprobs": 1})
    scores = body["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == body["usage"]["prompt_tokens"]
    assert len(cluster.submissions) == 3
    for place in cluster.places:
        goes_on = place.num_prompt_tokens > len(prompt)
        assert (len(place.block_keys) > 0) == goes_on
