"""What the table of quantisation errors is made of: pools that remember what a scale of another share would leave."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.kv_error import ANSWER, PROMPT, TEXTS, error_table, read_texts, variants
from benchmarks.engine.kv_scales import GRANULARITIES, RememberingPool
from engine.kv_pool import KvPool
from engine.quantised import CODES
from protocol.layout import QUANTISED_DTYPES, KvLayout

PLAIN = KvLayout(num_layers=2, block_size=4, num_kv_heads=3, head_dim=8, dtype="float32")
BLOCK = torch.tensor([1])


def random_heads(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, 3, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kept", QUANTISED_DTYPES)
def test_with_a_scale_per_token_and_head_it_remembers_what_workers_do(kept: str) -> None:
    workers = KvLayout(num_layers=2, block_size=4, num_kv_heads=3, head_dim=8, dtype=kept)
    real = KvPool(workers, 2, dtype="float32")
    simulated = RememberingPool(PLAIN, 2, kept, "token, head")
    slots = torch.tensor([4, 7, 5])
    for pool in (real, simulated):
        pool.write(1, slots, random_heads(3, 1), random_heads(3, 2))
    for found, expected in zip(simulated.gather(1, BLOCK), real.gather(1, BLOCK), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kept", QUANTISED_DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_what_shares_a_scale_is_near_by_its_highest(kept: str, granularity: str) -> None:
    """Tokens that come one by one, each higher than the last, so that a block's scale grows."""
    pool = RememberingPool(PLAIN, 2, kept, granularity)
    heads = random_heads(4) * 2.0 ** torch.arange(4)[:, None, None]
    for token in range(4):
        own = heads[token : token + 1]
        pool.write(0, torch.tensor([4 + token]), own, -own)
    keys, values = pool.gather(0, BLOCK)
    step = {"int8": 1 / 127, "fp8": 1 / 16}[kept]
    shared = {"token, head": (-1,), "token": (-2, -1), "block, head": (0, -1)}[granularity]
    highest = heads.abs().amax(shared, keepdim=True)
    assert ((keys[0] - heads).abs() <= highest * step * 1.5).all()  # half a step for each growth
    assert torch.equal(values, -keys)
    codes = {float(code) for code in (keys[0] / highest * CODES[kept].highest).flatten()}
    assert kept == "fp8" or all(abs(code - round(code)) < 1e-3 for code in codes)


def test_a_block_that_begins_anew_forgets_its_scale() -> None:
    pool = RememberingPool(PLAIN, 2, "int8", "block, head")
    pool.write(0, torch.arange(4, 8), random_heads(4) * 1e6, random_heads(4))
    pool.write(0, torch.arange(4, 6), random_heads(2, 3), random_heads(2, 4))
    keys, _ = pool.gather(0, BLOCK)
    torch.testing.assert_close(keys[0, :2], random_heads(2, 3), atol=0.05, rtol=0)


def test_every_text_is_long_enough_and_every_variant_has_a_row() -> None:
    assert read_texts().shape == (len(TEXTS), PROMPT + ANSWER)
    labels = [variant.label for variant in variants()]
    assert len(set(labels)) == len(labels) == 13
    figures = {"mean": 0.1, "max": 1.0, "perplexity": 2.0}
    row = {"kv": labels[0], **figures, "same_choice": 1.0, "same_answer": 0.5, "before_other": 3.0}
    assert (
        "| bfloat16 | – | any | 0.1000 | 1.000 | 2.0000 | 100.00 % | 50.0 % | 3 |"
        in error_table([row])
    )
