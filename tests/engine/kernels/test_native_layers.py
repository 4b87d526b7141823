"""A layer computed in C++ equals the layer computed in torch, with any number of threads."""

import gc
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import moonserve.engine
from moonserve.engine.kernels import Kernels, Step
from moonserve.engine.kernels.native_layers import NativeKernels
from moonserve.engine.kernels.native_library import FLAGS, LayersLibrary
from moonserve.engine.kernels.selector import FEW_TOKENS, MixedKernels, make_kernels
from moonserve.engine.kernels.shared_cores import SharedCores
from moonserve.engine.kernels.torch_layers import TorchKernels
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES, KvTensors
from moonserve.engine.model.config import ModelConfig, load_model_config
from moonserve.engine.model.weights import Weights, load_weights
from moonserve.protocol.errors import ConfigError
from tests.compilers import compile_strictly
from tests.engine.conftest import VARIANTS, Pair
from tests.engine.kernels.calls import kernels_folder, random_tensor
from tests.patience import until
from tests.random_models import make_model

BLOCK_SIZE, NUM_BLOCKS = 16, 600
CORES = os.sched_getaffinity(0)


def replica(pair: Pair, dtype: str) -> tuple[ModelConfig, Weights, KvTensors]:
    config = load_model_config(pair.path)
    weights = load_weights(pair.path, config, TORCH_DTYPES[dtype])
    return config, weights, KvTensors(config.kv_layout(BLOCK_SIZE, dtype), NUM_BLOCKS)


def torch_kernels(pair: Pair, dtype: str) -> tuple[TorchKernels, KvTensors]:
    config, weights, pool = replica(pair, dtype)
    return TorchKernels(config, weights, pool), pool


def native_kernels(pair: Pair, dtype: str, threads: int = 1) -> tuple[NativeKernels, KvTensors]:
    config, weights, pool = replica(pair, dtype)
    return NativeKernels(config, weights, pool, threads, kernels_folder()), pool


def make_step(positions: Sequence[int], rows: Sequence[int] | None = None) -> Step:
    """Builds a step with one token at each position, of no particular sequence. Attention is not computed."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(BLOCK_SIZE * NUM_BLOCKS, generator=generator)[: len(positions)]
    return Step(
        token_ids=torch.randint(0, 256, (len(positions),), generator=generator),
        positions=torch.tensor(positions),
        longest=max(positions) + 1,
        slots=slots,
        spans=(),
        rows=None if rows is None else torch.tensor(rows),
    )


def run(kernels: Kernels, step: Step, num_layers: int) -> list[torch.Tensor]:
    """Returns what each layer passes to attention, whose result is replaced by fixed values, and then the logits."""
    results: list[torch.Tensor] = []
    with torch.inference_mode():
        work = kernels.begin(step)
        for layer in range(num_layers):
            heads = kernels.project(layer, work)
            results += [each.clone() for each in heads]
            shape = (len(step.token_ids), heads[0].shape[1] * heads[0].shape[2])
            seen = random_tensor(layer, *shape, dtype=heads[0].dtype)
            if layer == num_layers - 1 and step.rows is not None:
                seen = kernels.select_rows(work, step.rows, seen)
            kernels.finish(layer, work, seen)
        results.append(kernels.logits(work))
    return results


def assert_alike(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Tolerates a few bfloat16 roundings, which later layers carry on. The mean difference must be nearly zero."""
    for own, reference in zip(found, expected, strict=True):
        assert own.dtype == reference.dtype
        difference = (own.float() - reference.float()).abs()
        scale = float(reference.float().abs().max())
        exact = reference.dtype == torch.float32 and own is not found[-1]
        assert difference.max() <= scale * (2e-5 if exact else 0.05)
        assert difference.mean() <= scale * (2e-6 if exact else 0.005)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_native_layers_equal_torch(name: str, dtype: str, pairs: dict[str, Pair]) -> None:
    """Covers norms, biases, query and key norms, tied embeddings, each rotation, one row and more than a group, and
    experts in float32: in bfloat16, some tokens of 530 choose other experts because of the last bit. Nothing but the
    step's own slots is written."""
    dtype = "float32" if load_model_config(pairs[name].path).experts else dtype
    reference, pool = torch_kernels(pairs[name], dtype)
    kernels, own_pool = native_kernels(pairs[name], dtype)
    layers = pool.layout.num_layers
    for positions in ([0], [700], range(3, 11), [0, 1023, 5, 5], range(20, 20 + 64), range(530)):
        step = make_step(list(positions))
        found = run(kernels, step, layers)
        assert_alike(found, run(reference, step, layers))
        rounded = found[-1].to(TORCH_DTYPES[dtype]).float()
        assert torch.equal(found[-1], rounded), "logits are rounded to the dtype"
        for piece in range(layers):
            assert_alike([own_pool.keys[piece], own_pool.values[piece]], [pool.keys[piece], pool.values[piece]])


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("name", ["llama-biases-llama3", "qwen3-yarn", "qwen3-moe"])
def test_number_of_threads_does_not_change_results(name: str, dtype: str, pairs: dict[str, Pair]) -> None:
    alone, pool = native_kernels(pairs[name], dtype)
    pools = [native_kernels(pairs[name], dtype, threads)[0] for threads in (2, 3)]
    layers = pool.layout.num_layers
    for count in (1, 5, 64, 300):
        step = make_step(list(range(count)))
        expected = run(alone, step, layers)
        for thread_pool in pools:
            assert all(map(torch.equal, run(thread_pool, step, layers), expected))


def threads_now() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_thread_pool_ends_with_its_kernels(llama: Pair) -> None:
    """The kernel lists a thread for a moment after it is joined, and threads of earlier tests may end at any time."""
    _alone, pool = native_kernels(llama, "float32")
    before = threads_now()
    thread_pool, _ = native_kernels(llama, "float32", threads=4)
    run(thread_pool, make_step([0, 1]), pool.layout.num_layers)
    own = threads_now() - before
    assert len(own) == 3
    del thread_pool
    gc.collect()
    until(lambda: not own & threads_now())


@pytest.mark.skipif(len(CORES) < 2, reason="there is no core to borrow")
def test_idle_cores_are_borrowed_while_no_other_worker_computes_and_change_no_bits(llama: Pair, tmp_path: Path) -> None:
    table = tmp_path / "cores"
    table.touch()
    own, other = SharedCores(f"{table}:0", 1), SharedCores(f"{table}:63", len(CORES))
    config, weights, pool = replica(llama, "bfloat16")
    layers, step = pool.layout.num_layers, make_step(range(3000))
    expected = run(native_kernels(llama, "bfloat16")[0], step, layers)
    before = threads_now()
    kernels = NativeKernels(config, weights, pool, 1, kernels_folder(), shared_cores=own)
    borrowers = threads_now() - before
    assert len(borrowers) == len(CORES) - 1

    def compute() -> int:
        """Returns the nanoseconds that the borrowing threads have computed for by the end of a step."""
        assert all(map(torch.equal, run(kernels, step, layers), expected))
        return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in borrowers)

    with own:
        begun = compute()
        until(lambda: compute() > begun + 1_000_000)
        with other:
            until(lambda: compute() == compute())
            assert compute() == compute()
        until(lambda: compute() > begun + 2_000_000)
    with pytest.raises(ValueError, match="rows are from 0 to 63"):
        SharedCores(f"{table}:64", 1)


def test_two_thread_pools_work_at_the_same_time(llama: Pair) -> None:
    """Two replicas in one process are called from a thread each, with more members than there are cores."""
    step = make_step(list(range(9)))
    expected = run(native_kernels(llama, "bfloat16")[0], step, 2)

    def work(_: int) -> bool:
        kernels, _pool = native_kernels(llama, "bfloat16", threads=2)
        return all(all(map(torch.equal, run(kernels, step, 2), expected)) for _ in range(50))

    with ThreadPoolExecutor(2) as callers:
        assert list(callers.map(work, range(2))) == [True] * 2


def test_mixed_kernels_choose_by_the_size_of_the_step(llama: Pair) -> None:
    config, weights, pool = replica(llama, "bfloat16")
    few = NativeKernels(config, weights, pool, 1, kernels_folder())
    many = TorchKernels(config, weights, pool)
    mixed = MixedKernels(few, many)
    assert mixed.name == "native+torch"
    for count, chosen in ((1, few), (FEW_TOKENS, few), (FEW_TOKENS + 1, many), (100, many)):
        step = make_step(list(range(count)), rows=[count - 1])
        assert all(map(torch.equal, run(mixed, step, 2), run(chosen, step, 2)))


def test_missing_compiler_is_reported_with_remedy(llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cublas"):
        llama.engine(kernels="cublas")
    monkeypatch.setenv("PATH", "")
    for options in ({"kernels": "auto"}, {"kernels": "native"}, {"attention": "auto"}):
        with pytest.raises(ConfigError, match=r"not available: no C\+\+ compiler.*--kernels torch"):
            llama.engine(**options, cache_folder=tmp_path)


def test_latent_attention_needs_native_kernels_or_those_of_transformers(
    pairs: dict[str, Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs["deepseek-v2"]
    assert pair.engine(kernels="auto").kernels_name == "native"
    with pytest.raises(ConfigError, match="torch has no latent attention; start with --kernels native or transformers"):
        make_kernels("torch", *replica(pair, "float32"), num_threads=1, cache_folder=kernels_folder())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"not available.*; or start with --kernels transformers"):
        pair.engine(kernels="auto", cache_folder=tmp_path)


def test_without_a_cache_folder_nothing_is_compiled(llama: Pair) -> None:
    engine = llama.engine(kernels="auto", attention="auto", cache_folder=None)
    assert (engine.kernels_name, engine.attention_name) == ("torch", "torch")


@pytest.mark.slow
def test_compilation_is_reported_once(llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LayersLibrary.__init__.__kwdefaults__, "flags", (*FLAGS, "-O0"))  # is fast
    reported: list[str] = []
    for _ in range(2):
        make_kernels(
            "native",
            *replica(llama, "float32"),
            num_threads=1,
            cache_folder=tmp_path,
            compiling=lambda: reported.append("compiling"),
        )
    assert reported == ["compiling"]


def test_odd_row_sizes_are_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path, make_model("llama", tmp_path, intermediate_size=95))
    with pytest.raises(ConfigError, match="intermediate_size 95 is odd; or start with --kernels torch"):
        make_kernels("auto", *replica(pair, "bfloat16"), num_threads=1, cache_folder=kernels_folder())
    float_kernels, _ = native_kernels(pair, "float32")
    step = make_step(list(range(5)))
    assert_alike(run(float_kernels, step, 2), run(torch_kernels(pair, "float32")[0], step, 2))


SOURCES = sorted(Path(moonserve.engine.__file__).parent.rglob("*.cpp"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_sources_compile_without_warnings(compiler: str, source: Path, tmp_path: Path) -> None:
    """Code is only parsed and type-checked: optimising takes ten times as long."""
    compile_strictly(compiler, source, (*FLAGS, "-fsyntax-only"), tmp_path)
