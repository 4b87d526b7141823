"""Engines whose KV lies in elastic memory compute what they always do, whatever is mapped and unmapped around them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.config import load_model_config
from engine.elastic import CpuBacking, ElasticModel, ElasticPool, Reserve
from engine.engine import Engine
from protocol.ids import BlockId
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt

BLOCK_SIZE = 16
OUTPUT = 24


@dataclass
class _Stream:
    """One greedy continuation over an engine's elastic blocks."""

    engine: Engine
    model: ElasticModel
    tokens: list[int]
    blocks: list[BlockId]
    num_computed: int = 0

    def step(self) -> None:
        end = len(self.tokens)
        piece = make_slice(
            self.tokens, self.num_computed, end, self.blocks, request_id=self.model.name
        )
        (sampled,) = self.engine.execute([piece])
        assert sampled is not None
        self.num_computed = end
        self.tokens.append(sampled.token_id)


def begin(pool: ElasticPool, pair: Pair, name: str, prompt: list[int]) -> _Stream:
    """Its blocks lie apart from each other, in pages that it shares with blocks that come and go."""
    config = load_model_config(pair.path)
    layout = config.kv_layout(BLOCK_SIZE, "float32")
    model = pool.add_model(name, layout)
    engine = Engine.load(
        pair.path, config=config, layout=layout, num_blocks=model.num_blocks, memory=model.memory
    )
    needed = layout.blocks_for(len(prompt) + OUTPUT)
    blocks = model.allocate(2 * needed)
    assert blocks is not None
    own = blocks[::2] if name == "a" else blocks[1::2]
    model.free([block for block in blocks if block not in own])
    return _Stream(engine, model, list(prompt), own)


@pytest.mark.parametrize("variant", ["llama", "qwen3-yarn"])
def test_tokens_are_those_of_the_reference_while_pages_come_and_go(
    pairs: dict[str, Pair], variant: str
) -> None:
    """Two replicas share a budget that a third fills and empties in every step."""
    pair, prompt = pairs[variant], random_prompt(70)
    reserve = Reserve(low=0, high=0, idle_s=0.0)
    with ElasticPool(4 << 20, CpuBacking(frame_bytes=4096), reserve=reserve) as pool:
        streams = [begin(pool, pair, name, prompt) for name in ("a", "b")]
        restless = pool.add_model("restless", streams[0].model.layout)
        for _ in range(OUTPUT):
            passing = restless.allocate(restless.available())
            assert passing
            for stream in streams:
                stream.step()
            restless.free(passing)
        expected = pair.generate(prompt, OUTPUT)
        for stream in streams:
            assert stream.tokens[len(prompt) :] == expected
        pool.validate()


def test_a_sequence_over_the_whole_budget_needs_the_others_to_have_let_go(llama: Pair) -> None:
    """First one model, then the other, has all the memory there is."""
    prompt = random_prompt(220)
    with ElasticPool(7 * 16 << 10, CpuBacking(frame_bytes=4096)) as pool:
        config = load_model_config(llama.path)
        layout = config.kv_layout(BLOCK_SIZE, "float32")
        expected = llama.generate(prompt, 4)
        for turn in range(4):
            name = "ab"[turn % 2]
            model = pool.add_model(name, layout)
            engine = Engine.load(
                llama.path,
                config=config,
                layout=layout,
                num_blocks=model.num_blocks,
                memory=model.memory,
            )
            blocks = model.allocate(model.most())
            assert blocks is not None
            assert len(blocks) == layout.blocks_for(len(prompt) + 4)
            stream = _Stream(engine, model, list(prompt), blocks)
            for _ in range(4):
                stream.step()
            assert stream.tokens[len(prompt) :] == expected
            model.free(blocks)
            pool.remove_model(name)
