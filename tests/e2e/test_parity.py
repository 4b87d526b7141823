"""The whole cluster's greedy tokens and log-probabilities are those of transformers on the same weights, in float32.

Prompts of 1 to 3,000 tokens travel from gateway to prefill worker to decode worker in chunks and blocks that divide
them or do not, computed or re-used, while other requests run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from models import demo_model_path
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.load import BackgroundLoad
from tests.e2e.reference import Continuation, continuations, load_reference, num_ties
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from tests.thoroughness import THOROUGH

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_PROMPTS = 20 if THOROUGH else 14  # at least the lengths around borders
NUM_TOKENS = 20
STREAMS = 8 if THOROUGH else 2  # of others, beside four of our own
LONGEST = 3_000
PREFILL_WORKERS = ("prefill-0", "prefill-1")

# Fields of the transformers configuration. Mistral's window is shorter than most prompts.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}


@dataclass(frozen=True)
class Shape:
    """How a cluster cuts prompts up."""

    block_size: int
    chunk: int

    @property
    def flags(self) -> tuple[str, ...]:
        cuts = ("--block-size", str(self.block_size), "--max-num-batched-tokens", str(self.chunk))
        return ("--dtype", "float32", "--num-threads", "1", *cuts)

    def lengths(self) -> list[int]:
        """`NUM_PROMPTS` lengths, those around a border of a block or chunk among them."""
        block, chunk = self.block_size, self.chunk
        borders = {1, 2, block - 1, block, block + 1, 2 * block, chunk - 1, chunk, chunk + 1}
        borders |= {2 * chunk, 2 * chunk + 1, 5 * block + 7, LONGEST}
        dice = random.Random(0)
        while len(borders) < NUM_PROMPTS:
            borders.add(dice.randint(3, 1_200))
        return sorted(borders)

    def reusable(self, num_tokens: int) -> int:
        """Tokens of a known prompt that need no computing: full blocks, and never the last token."""
        return (num_tokens - 1) // self.block_size * self.block_size


DIVIDING = Shape(block_size=16, chunk=256)
NOT_DIVIDING = Shape(block_size=32, chunk=100)


@dataclass(frozen=True)
class Exam:
    """Prompts of one shape and the answers that are expected of a checkpoint."""

    model: Path
    shape: Shape
    vocab_size: int
    prompts: list[list[int]]
    expected: list[Continuation]

    def take(self, cluster: Cluster) -> list[int]:
        """Asks everything, several prompts at a time; how many tokens of each prompt were cached."""
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: ask(cluster, prompt), self.prompts))
        ties = [num_ties(*pair) for pair in zip(answers, self.expected, strict=True)]
        assert sum(ties) <= 1, "ties are rare"
        return [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]

    @property
    def reusable(self) -> list[int]:
        return [self.shape.reusable(len(prompt)) for prompt in self.prompts]


def ask(cluster: Cluster, prompt: Sequence[int]) -> dict[str, Any]:
    return cluster.complete(
        prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        ignore_eos=True,
        logprobs=0,
        return_token_ids=True,
    )


def exam(model: Path, shape: Shape) -> Exam:
    reference = load_reference(model)
    vocab_size: int = reference.config.vocab_size
    dice = random.Random(1)
    prompts = [dice.choices(range(vocab_size), k=length) for length in shape.lengths()]
    expected = continuations(reference, prompts, NUM_TOKENS)
    return Exam(model, shape, vocab_size, prompts, expected)


def family_model(family: str, folder: Path) -> Path:
    make_model(family, folder, seed=1, max_position_embeddings=4_096, **FAMILIES[family])
    return folder


def assert_passes(paper: Exam, log_dir: Path, *flags: str) -> None:
    with (
        running_cluster(paper.model, log_dir, *paper.shape.flags, *flags) as cluster,
        BackgroundLoad(cluster, paper.vocab_size, streams=STREAMS) as load,
    ):
        assert paper.take(cluster) == [0] * NUM_PROMPTS
        assert paper.take(cluster) == paper.reusable
        assert load.num_finished > 0


@pytest.mark.parametrize(
    ("family", "shape", "transport"),
    [
        ("llama", DIVIDING, "shm"),
        ("mistral", NOT_DIVIDING, "tcp"),
        ("qwen2", NOT_DIVIDING, "shm"),
        ("qwen3", DIVIDING, "tcp"),
    ],
)
def test_each_family_computes_what_transformers_computes(
    family: str, shape: Shape, transport: str, tmp_path: Path
) -> None:
    paper = exam(family_model(family, tmp_path / "model"), shape)
    assert_passes(paper, tmp_path / "logs", "--transports", transport)


def test_the_demo_model_computes_what_transformers_computes(tmp_path: Path) -> None:
    """Weights that were trained, over what is chosen where nothing is said; the families have the rest."""
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    assert_passes(exam(model, NOT_DIVIDING), tmp_path / "logs")


def test_a_prefix_from_the_store_is_as_good_as_a_computed_one(tmp_path: Path) -> None:
    """Two workers of each kind share prefixes through the store, and after both prefill workers have died it is the
    only one that knows them."""
    paper = exam(family_model("llama", tmp_path / "model"), NOT_DIVIDING)
    workers = ("--prefill-workers", "2", "--decode-workers", "2")
    flags = (*paper.shape.flags, *workers, "--store-reads", "always")
    with running_cluster(paper.model, tmp_path / "logs", *flags) as cluster:
        with BackgroundLoad(cluster, paper.vocab_size, streams=STREAMS):
            assert paper.take(cluster) == [0] * NUM_PROMPTS
        num_blocks = sum(len(prompt) // paper.shape.block_size for prompt in paper.prompts)
        cluster.wait_for("the write-behind", lambda: stored_blocks(cluster) >= num_blocks)
        with BackgroundLoad(cluster, paper.vocab_size, streams=STREAMS, seed=1):
            assert paper.take(cluster) == paper.reusable
        kill_prefill_workers(cluster)
        with BackgroundLoad(cluster, paper.vocab_size, streams=STREAMS, seed=2):
            assert paper.take(cluster) == paper.reusable
        loaded = [cluster.counters(name)["store_hit_blocks"] for name in PREFILL_WORKERS]
        assert sum(loaded) * paper.shape.block_size >= sum(paper.reusable)


def stored_blocks(cluster: Cluster) -> int:
    """How many blocks the conductor knows to be in the store."""
    stores = [each for each in cluster.instances() if each["role"] == "store"]
    return sum(store["indexed_blocks"] for store in stores)


def kill_prefill_workers(cluster: Cluster) -> None:
    """Returns when the supervisor's new ones are members."""
    epochs = {name: cluster.epoch(name) for name in PREFILL_WORKERS}
    pids = cluster.pids()
    for name in PREFILL_WORKERS:
        os.kill(pids[name], signal.SIGKILL)
    cluster.wait_for(
        "their successors",
        lambda: all(cluster.epoch(n) > e for n, e in epochs.items()),
        2 * PATIENCE_S,
    )
