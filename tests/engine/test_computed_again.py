"""Output that was decoded token by token and is computed again, many tokens at once and behind a prompt in other
chunks, has the same bits: a stream that goes on elsewhere draws what it would have drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from engine.attention import native
from engine.engine import Engine
from protocol.request import SamplingParams
from tests.engine.conftest import Pair
from tests.engine.steps import make_slice, random_prompt

PROMPT, ALL = 37, 340  # tokens
DECODED = [0, *range(PROMPT, ALL + 1)]
DRAWN = SamplingParams(max_tokens=ALL, temperature=1.0, seed=3, num_logprobs=5)


def computed(engine: Engine, tokens: Sequence[int], ends: Sequence[int]) -> tuple[bytes, object]:
    """The pool, and what follows the last token."""
    blocks = range(engine.layout.blocks_for(len(tokens)))
    engine.memory[:] = bytes(engine.memory.nbytes)
    for start, end in itertools.pairwise(ends):
        piece = make_slice(tokens, start, end, blocks, sampling=DRAWN, num_prompt_tokens=PROMPT)
        [sampled] = engine.execute([piece])
    return bytes(engine.memory), sampled


@pytest.mark.parametrize("kept", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_output_has_the_same_bits_when_it_is_computed_again(
    name: str, dtype: str, kept: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step, and in chunks of which some end with the prompt, before its last token and within the output."""
    monkeypatch.setattr(native, "_SINGLES_AT_ONCE", 100)
    engine = pairs[name].engine(dtype=dtype, kv_dtype=kept, kernels="native", attention="native", num_blocks=24)
    tokens = random_prompt(ALL, seed=1)
    decoded = computed(engine, tokens, DECODED)
    for again in ([0, ALL], [0, 20, 36, 37, 200, ALL], [0, 36, 38, 39, 339, ALL]):
        assert computed(engine, tokens, again) == decoded
