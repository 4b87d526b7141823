"""Tokens of `moonserve serve --engine vllm` equal those of one vLLM instance, from wherever a prompt's KV comes.

By default two families, each fourth prompt and one restart; with MOONSERVE_TEST_EXAMPLES=1 all. `test_parity` has all
families, whose KV takes the same way through the connector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.thoroughness import examples
from tests.vllm.clusters import Cluster, running_cluster
from tests.vllm.models import FAMILIES, RESTARTED, write_model
from tests.vllm.prompts import parity_prompts
from tests.vllm.reference import Expected, Reference, assert_found, assert_same
from tests.vllm.servers import ENGINE, Answer, as_flags
from tests.vllm.stores import until_quiet

MAX_TOKENS = 8
FEW = 4
IS_FULL = examples(100) >= 100
PROMPTS = parity_prompts()[:: 1 if IS_FULL else FEW]
STEPS = {16: 1, 1: FEW}
"""One at a time, only each fourth prompt is asked for, since every token is then a step of its own."""


@dataclass(slots=True, eq=False)
class Site:
    """A cluster of one family that has computed all prompts, by salt "16" and "1"."""

    cluster: Cluster
    block_size: int
    expected: list[Expected]
    cold: dict[int, list[Answer]]

    def ask(self, concurrency: int) -> list[Answer]:
        prompts = PROMPTS[:: STEPS[concurrency]]
        return self.cluster.answers(prompts, MAX_TOKENS, concurrency=concurrency, cache_salt=str(concurrency))

    def check(self, answers: list[Answer], concurrency: int) -> None:
        assert_same(answers, self.expected[:: STEPS[concurrency]], PROMPTS[:: STEPS[concurrency]])


@pytest.fixture(scope="module", params=FAMILIES if IS_FULL else RESTARTED)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    model = write_model(name, folder / "model")
    engine = {**ENGINE, **FAMILIES[name].engine}
    flags = ("--dram", "256MiB", "--ssd", f"{folder / 'disk'}:1GiB", *as_flags(engine, "--vllm."))
    with (
        Reference(model, FAMILIES[name].engine, [PROMPTS], MAX_TOKENS) as reference,
        running_cluster(model, *flags, log_dir=folder / "logs") as cluster,
    ):
        site = Site(cluster, engine["block_size"], reference.answers()[0], {})
        site.cold = {concurrency: site.ask(concurrency) for concurrency in STEPS}
        until_quiet(cluster.registry)
        yield site


@pytest.mark.parametrize("concurrency", STEPS)
def test_prompts_that_are_in_no_cache_have_the_tokens_of_one_instance(site: Site, concurrency: int) -> None:
    site.check(site.cold[concurrency], concurrency)


@pytest.mark.parametrize("is_store_restarted", [False, True] if IS_FULL else [True])
def test_restarted_workers_find_the_prompts_in_the_store(site: Site, is_store_restarted: bool) -> None:
    """In its memory, and on the disk of a store that is restarted, too."""
    if is_store_restarted:
        site.cluster.restart("store-0")
    site.cluster.restart("prefill-0", "decode-0")
    for concurrency, step in STEPS.items():
        answers = site.ask(concurrency)
        site.check(answers, concurrency)
        assert_found(answers, PROMPTS[::step], site.block_size)
