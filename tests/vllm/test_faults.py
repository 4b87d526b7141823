"""Faults of the processes around a vLLM server with the connector: its tokens stay right, and no request hangs.

The servers are shared. Each test begins with all processes alive, with prompts and salts of its own, so the one that
kills a server is the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from moonserve.vllm.serving.sampling import REMOTE_DECODE
from tests.patience import PATIENCE_S, until
from tests.vllm.models import write_model
from tests.vllm.prompts import random_prompt
from tests.vllm.servers import (
    MAX_NUM_SEQS,
    Answer,
    VllmServer,
    decode_prefilled,
    disaggregated,
    prefilled,
    running,
    until_shared,
)
from tests.vllm.stores import StoreNode

MAX_TOKENS = 8
DRAM = 16 << 20
TOKEN_BYTES = 1 << 10
"""KV of one token: 2 layers of 2 heads with keys and values of 32 floats each."""
LEASE_S = 6.0
SETTINGS = {"lease_s": LEASE_S, "timeout_s": 3.0}
_seeds = itertools.count(1_000)


@dataclass(slots=True, eq=False)
class Site:
    """A prefill server, a decode server, and a store node without a disk."""

    prefill: VllmServer
    decode: VllmServer
    store: StoreNode


def new_prompts(count: int = 8, length: int = 700) -> list[list[int]]:
    return [random_prompt(length + 13 * place, next(_seeds)) for place in range(count)]


def stored(site: Site, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Returns the right answers, once the prompts are in the store."""
    answers = site.prefill.complete_all(prompts, MAX_TOKENS, concurrency=MAX_NUM_SEQS)
    site.store.until_quiet()
    return answers


def assert_right(answers: Sequence[Answer], right: Sequence[Answer]) -> None:
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("faults")
    model = write_model("llama", folder / "model")
    store = StoreNode(folder / "store", dram=DRAM, ssd=False)
    prefill, decode = (
        VllmServer(model, folder / f"{name}.log", {"join": store.join, **SETTINGS}) for name in ("prefill", "decode")
    )
    with store, running(prefill, decode):
        yield Site(prefill, decode, store)


@pytest.fixture
def site(shared_site: Site) -> Site:
    if shared_site.store.node is None:  # a test has killed it
        shared_site.store.start()
    return shared_site


def failed_blocks(server: VllmServer) -> float:
    return server.metric("moonserve_connector_failed_blocks_total")


def test_damaged_blocks_in_the_store_are_computed_again(site: Site) -> None:
    prompts = new_prompts()
    right = stored(site, prompts)
    before = failed_blocks(site.decode)
    assert site.store.flip_bytes(every=8 << 10) > 1_000
    assert_right(site.decode.complete_all(prompts, MAX_TOKENS, concurrency=4), right)
    until(lambda: failed_blocks(site.decode) > before)
    # The damaged blocks are not found a second time.
    site.decode.reset_prefix_cache()
    assert_right(site.decode.complete_all(prompts, MAX_TOKENS, concurrency=4), right)


def test_a_full_store_evicts_and_harms_no_request(site: Site) -> None:
    length = 1_000
    prompts = new_prompts(2 * DRAM // TOKEN_BYTES // length, length)
    right = stored(site, prompts)
    assert_right(site.decode.complete_all(prompts, MAX_TOKENS, concurrency=MAX_NUM_SEQS), right)
    assert site.store.stats().num_objects < sum(len(prompt) // 32 for prompt in prompts)


def test_without_its_store_a_server_computes_and_then_finds_the_restarted_one(site: Site) -> None:
    prompts = new_prompts()
    right = stored(site, prompts)
    site.store.kill()
    assert_right(site.decode.complete_all(prompts, MAX_TOKENS, concurrency=MAX_NUM_SEQS), right)
    site.store.start()
    until_shared(site.prefill, site.decode)


def test_a_suspended_store_delays_requests_by_a_bounded_time(site: Site) -> None:
    prompts = new_prompts()
    right = stored(site, prompts)
    with site.store.suspended():
        answers = site.decode.complete_all(prompts, MAX_TOKENS, concurrency=MAX_NUM_SEQS, timeout_s=PATIENCE_S)
        more = site.prefill.complete_all(new_prompts(4), 1, concurrency=4, timeout_s=PATIENCE_S)
    assert_right(answers, right)
    assert len(more) == 4
    until_shared(site.prefill, site.decode)


def test_a_store_that_is_killed_amid_requests_harms_none(site: Site) -> None:
    prompts = new_prompts(24)
    right = stored(site, prompts)
    before = site.decode.metric("vllm:request_success_total")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(site.decode.complete_all, prompts, MAX_TOKENS, concurrency=4)
        until(lambda: site.decode.metric("vllm:request_success_total") > before or asked.done())
        site.store.kill()
        assert_right(asked.result(), right)


def test_a_prompt_whose_prefill_server_is_suspended_is_computed(site: Site) -> None:
    prompt = new_prompts(1)[0]
    right = site.prefill.complete(prompt, MAX_TOKENS, salt="right")
    parameters = prefilled(site.prefill, prompt, salt="silent")
    with site.prefill.suspended():
        answer = decode_prefilled(site.decode, prompt, MAX_TOKENS, parameters, salt="silent")
    assert_right([answer], [right])
    assert_right([disaggregated(site.prefill, site.decode, prompt, MAX_TOKENS, salt="later")], [right])


def test_a_decode_request_that_comes_after_the_lease_is_computed(site: Site) -> None:
    prompt = new_prompts(1)[0]
    right = site.prefill.complete(prompt, MAX_TOKENS, salt="right")
    answer = site.prefill.complete(prompt, 1, salt="late", kv_transfer_params=REMOTE_DECODE)
    until(lambda: used_blocks(site.prefill) > 0)
    until(lambda: used_blocks(site.prefill) == 0)
    assert answer.kv_transfer_params is not None
    late = decode_prefilled(site.decode, prompt, MAX_TOKENS, answer.kv_transfer_params, salt="late")
    assert_right([late], [right])


def used_blocks(server: VllmServer) -> float:
    """Returns the share of a server's blocks that requests or hand-offs hold."""
    return server.metric("vllm:kv_cache_usage_perc")


def test_a_prompt_whose_prefill_server_died_is_computed(site: Site) -> None:
    prompt = new_prompts(1)[0]
    right = site.prefill.complete(prompt, MAX_TOKENS, salt="right")
    parameters = prefilled(site.prefill, prompt, salt="dead")
    site.prefill.kill()
    site.store.kill()  # which has the prompt too
    assert_right([decode_prefilled(site.decode, prompt, MAX_TOKENS, parameters, salt="dead")], [right])
