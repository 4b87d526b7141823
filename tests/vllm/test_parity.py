"""Tokens of vLLM servers with the connector equal those of one instance, from wherever a prompt's KV comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.vllm.models import FAMILIES, write_model
from tests.vllm.prompts import parity_prompts
from tests.vllm.reference import Expected, Reference, assert_found, assert_same
from tests.vllm.servers import Answer, VllmServer, disaggregated, running, until_shared
from tests.vllm.stores import StoreNode

MAX_TOKENS = 8
FEW = 4
"""One at a time, only each such prompt is asked for, since every token is then a step of its own."""
SECOND: dict[str, dict[str, Any]] = {
    "llama": {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
    "gpt_oss": {"flags": ("--no-enable-prefix-caching",)},
}
"""How the second server of a family differs: a worker process of its own, which is vLLM's default; only the store has
prefixes."""
PROMPTS = parity_prompts()
concurrencies = pytest.mark.parametrize("concurrency", [1, 16])


@dataclass(slots=True, eq=False)
class Site:
    """Two servers of one family and their store. `first` has computed all prompts, by salt "cold 1" and "cold 16"."""

    first: VllmServer
    second: VllmServer
    store: StoreNode
    expected: list[Expected]
    alone: list[Expected]
    """Answers of the reference to `chosen(1)`, one by one."""
    cold: dict[int, list[Answer]]

    def ask(self, server: VllmServer, concurrency: int, salt: str) -> list[Answer]:
        prompts = chosen(concurrency)
        return server.complete_all(prompts, MAX_TOKENS, concurrency=concurrency, salt=salt)

    def check(self, answers: Sequence[Answer], concurrency: int) -> None:
        assert_same(answers, self.expected[:: step_of(concurrency)], chosen(concurrency))

    def check_found(self, answers: Sequence[Answer], concurrency: int) -> None:
        """Checks that the answers are right, and that all full blocks of their prompts were found."""
        self.check(answers, concurrency)
        assert_found(answers, chosen(concurrency), self.first.block_size)


def step_of(concurrency: int) -> int:
    return FEW if concurrency == 1 else 1


def chosen(concurrency: int) -> list[list[int]]:
    return PROMPTS[:: step_of(concurrency)]


@pytest.fixture(scope="module", params=FAMILIES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    name: str = request.param
    family = FAMILIES[name]
    folder = tmp_path_factory.mktemp(name)
    model = write_model(name, folder / "model")
    reference = Reference(model, family.engine, [PROMPTS, *([prompt] for prompt in chosen(1))], MAX_TOKENS)
    store = StoreNode(folder / "store", dram=512 << 20)  # of less, a slow disk loses blocks for want of room
    first = VllmServer(model, folder / "first.log", {"join": store.join}, family.engine)
    second = VllmServer(model, folder / "second.log", {"join": store.join}, family.engine, **SECOND.get(name, {}))
    with reference, store, running(first, second):
        together, *alone = reference.answers()
        site = Site(first, second, store, together, [batch[0] for batch in alone], {})
        site.cold = {concurrency: site.ask(first, concurrency, f"cold {concurrency}") for concurrency in (1, 16)}
        store.until_quiet()
        yield site


def test_one_instance_gives_a_prompt_the_same_tokens_alone_and_among_others(site: Site) -> None:
    site.check([each.answer for each in site.alone], 1)


@concurrencies
def test_prompts_that_are_in_no_cache_have_the_tokens_of_one_instance(site: Site, concurrency: int) -> None:
    site.check(site.cold[concurrency], concurrency)


@concurrencies
def test_another_server_finds_the_prompts_in_the_store(site: Site, concurrency: int) -> None:
    site.second.reset_prefix_cache()
    site.check_found(site.ask(site.second, concurrency, f"cold {concurrency}"), concurrency)


@concurrencies
def test_a_restarted_store_has_the_prompts_on_its_disk(site: Site, concurrency: int) -> None:
    site.store.restart()
    until_shared(site.first, site.second)
    site.second.reset_prefix_cache()
    site.check_found(site.ask(site.second, concurrency, f"cold {concurrency}"), concurrency)


@concurrencies
def test_a_decode_server_goes_on_where_a_prefill_server_ended(site: Site, concurrency: int) -> None:
    before = site.second.metric("vllm:external_prefix_cache_hits_total")

    def ask(prompt: list[int]) -> Answer:
        return disaggregated(site.first, site.second, prompt, MAX_TOKENS, salt=f"handoff {concurrency}")

    with ThreadPoolExecutor(concurrency) as threads:
        site.check(list(threads.map(ask, chosen(concurrency))), concurrency)
    fetched = site.second.metric("vllm:external_prefix_cache_hits_total") - before
    assert fetched >= 0.9 * sum(map(len, chosen(concurrency)))
