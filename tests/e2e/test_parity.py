"""A cluster's greedy tokens equal those of a reference: transformers with its log-probabilities, on the same weights in
float32, or a single engine for quantised KV and weights and for a device with its own memory.

Prompts of 1 to 3,000 tokens go from gateway to prefill worker to decode worker, in chunks and blocks that may or may
not divide them: computed, reused, loaded from the store, and sent again, while other requests run.
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonserve.engine.model.config import load_model_config
from moonserve.models import demo_model_path
from tests.e2e.cluster import Cluster, cached_of, running_cluster, tokens_of
from tests.e2e.load import BackgroundLoad
from tests.e2e.reference import Continuation, continuations, load_reference, num_ties, one_engines
from tests.random_models import VOCAB_SIZE, make_model
from tests.thoroughness import THOROUGH

NUM_PROMPTS = 20 if THOROUGH else 14  # at least the lengths around borders
NUM_TOKENS = 20
STREAMS = 8 if THOROUGH else 2  # background streams, in addition to the prompts under test
LONGEST = 3_000
LONG_ANSWER = 160

# Fields of the transformers configuration. Mistral's window is shorter than most prompts. tests/engine checks that
# all families compute correctly; this file checks how prompts travel.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48},
    "deepseek_v3": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "mscale_all_dim": 1.0}
    },
    "olmo2": {},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Cluster, and the way in which it divides prompts."""

    family: str
    block_size: int
    chunk: int
    flags: tuple[str, ...] = ()
    kept: str = ""  # dtype of the stored KV, for one engine as the reference; empty = transformers is the reference
    quantise: str = "auto"  # format of weights
    lengths: tuple[int, ...] = ()  # of the prompts; empty = around every border
    num_workers: int = 1  # of each kind

    @property
    def all_flags(self) -> tuple[str, ...]:
        workers = str(self.num_workers)
        return (
            *("--dtype", "float32", "--num-threads", "1", "--store-reads", "always"),
            *("--block-size", str(self.block_size), "--max-num-batched-tokens", str(self.chunk)),
            *("--prefill-workers", workers, "--decode-workers", workers, "--quantize", self.quantise, *self.flags),
        )

    def names(self, role: str) -> list[str]:
        return [f"{role}-{number}" for number in range(self.num_workers)]

    def prompts(self) -> list[list[int]]:
        """Returns prompts of the given lengths, or of `NUM_PROMPTS` lengths with all borders of blocks and chunks."""
        block, chunk, dice = self.block_size, self.chunk, random.Random(0)
        borders = {1, 2, block - 1, block, block + 1, 2 * block, chunk - 1, chunk, chunk + 1}
        borders |= {2 * chunk, 2 * chunk + 1, 5 * block + 7, LONGEST}
        while len(borders) < NUM_PROMPTS:
            borders.add(dice.randint(3, 1_200))
        lengths = self.lengths or sorted(borders)
        return [dice.choices(range(VOCAB_SIZE), k=length) for length in lengths]

    def reusable(self, prompts: Sequence[list[int]]) -> list[int]:
        """Returns the number of tokens of known prompts that are not recomputed: full blocks without the last token."""
        return [(len(prompt) - 1) // self.block_size * self.block_size for prompt in prompts]


CASES = {
    "mistral over tcp": Case(family="mistral", block_size=32, chunk=100, flags=("--transports", "tcp")),
    "qwen2 over shm, two workers of each kind": Case(
        family="qwen2", block_size=16, chunk=256, flags=("--transports", "shm", "--speculative", "on"), num_workers=2
    ),
    **{
        family: Case(family=family, block_size=32, chunk=100, lengths=(1, 31, 33, 100, 513, 1_100))
        for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
    },
    "the layers of transformers": Case(family="olmo2", block_size=32, chunk=100, lengths=(1, 31, 33, 100, 101, 300)),
    "int8 in blocks of 512": Case(
        family="llama",
        block_size=512,
        chunk=2_048,
        flags=("--kv-cache-dtype", "int8"),
        kept="int8",
        lengths=(5, 100, 512, 513, 1_100),
    ),
    "weights of 4 bits": Case(
        family="qwen2",
        block_size=16,
        chunk=100,
        flags=("--transports", "tcp"),
        kept="auto",
        quantise="int4",
        lengths=(1, 5, 16, 17, 100, 101, 513),
    ),
    # As on a GPU: nothing is computed before its input is loaded or sent before it is stored, and decode steps start
    # before earlier steps have ended. Only the device is simulated.
    "staged device": Case(
        family="qwen3",
        block_size=16,
        chunk=100,
        flags=("--device", "cpu-staged", "--layered-loads", "always", "--async-scheduling"),
        kept="auto",
        lengths=(1, 5, 16, 17, 100, 513),
    ),
}


@dataclass(frozen=True)
class Exam:
    """Prompts and their expected answers."""

    prompts: list[list[int]]
    expected: Sequence[Continuation] | Sequence[list[int]]
    num_tokens: int = NUM_TOKENS

    def take(self, cluster: Cluster) -> list[int]:
        """Sends all prompts, several at a time, and checks the answers. Returns the cached tokens of each prompt."""
        with ThreadPoolExecutor(5) as pool:
            ask = pool.map(lambda p: cluster.greedy(p, self.num_tokens, logprobs=0), self.prompts)
            answers = list(ask)
        ties = 0
        for answer, expected in zip(answers, self.expected, strict=True):
            if isinstance(expected, Continuation):
                ties += num_ties(answer, expected)
            else:
                assert tokens_of(answer) == expected
        assert ties <= 1, "ties are rare"
        return list(map(cached_of, answers))


@pytest.mark.parametrize("name", CASES)
def test_computed_cached_stored_and_resent_tokens_equal_the_reference(name: str, tmp_path: Path) -> None:
    """Tokens are right for unknown prompts and for prompts in all workers, in the store, or in prefill workers only."""
    case, model = CASES[name], tmp_path / "model"
    make_model(case.family, model, seed=1, max_position_embeddings=4_096, **FAMILIES[case.family])
    prompts = case.prompts()
    if case.kept:
        options = {"kv_dtype": case.kept, "quantise": case.quantise}
        exam = Exam(prompts, one_engines(model, prompts, NUM_TOKENS, case.block_size, **options))
    else:
        exam = Exam(prompts, continuations(load_reference(model), prompts, NUM_TOKENS))
    reusable = case.reusable(prompts)
    with running_cluster(model, tmp_path / "logs", *case.all_flags) as cluster, ExitStack() as load:
        if not case.kept:
            busy = load.enter_context(BackgroundLoad(cluster, VOCAB_SIZE, streams=STREAMS))
        assert exam.take(cluster) == [0] * len(prompts)
        cluster.wait_until_stored(prompts, case.block_size)
        assert exam.take(cluster) == reusable
        if not case.kept:
            assert busy.num_finished > 0
        load.close()
        cluster.restart(*case.names("prefill"))
        assert exam.take(cluster) == reusable
        loaded = [cluster.counter(name, "store_hit_blocks") for name in case.names("prefill")]
        assert sum(loaded) * case.block_size >= sum(reusable)
        cluster.restart(*case.names("decode"))
        assert exam.take(cluster) == reusable
        assert not cluster.tracebacks()


def test_a_sequence_preempted_to_the_store_continues_with_the_same_tokens(tmp_path: Path) -> None:
    """Two prefill stages each send codes and scales of their own layers to a decode worker that has room for two and a
    half of five answers. Preempted sequences resume with their codes from the store and have the same tokens."""
    model = demo_model_path()
    lengths = (290, 310, 330, 350, 370)
    case = Case(family="", block_size=32, chunk=128, kept="fp8", lengths=lengths)
    prompts = case.prompts()
    exam = Exam(prompts, one_engines(model, prompts, LONG_ANSWER, case.block_size, kv_dtype=case.kept), LONG_ANSWER)
    layout = load_model_config(model).kv_layout(case.block_size, "float32", case.kept)
    flags = (
        *("--dtype", "float32", "--num-threads", "1", "--kv-cache-dtype", case.kept),
        *("--block-size", str(case.block_size), "--pipeline-parallel-size", "2"),
        *("--max-model-len", "640", "--kv-cache-memory", str(40 * layout.block_bytes)),
        *("--max-num-batched-tokens", str(case.chunk), "--max-num-seqs", "16"),
        *("--block-allocation", "on-demand"),  # admits more sequences than can stay
    )
    with running_cluster(model, tmp_path / "logs", *flags) as cluster:
        for _ in range(20):  # until a preempted sequence is fetched again
            exam.take(cluster)
            counters = cluster.counters("decode-0")
            if counters["fetched_blocks"]:
                break
        cluster.wait_until_all_is_free()
        assert counters["preemptions_kept"] > 0, counters
        assert counters["fetched_blocks"] > 0, counters
        assert cluster.counters("prefill-0")["handed_off_requests"] >= len(prompts)
        assert not cluster.tracebacks()
