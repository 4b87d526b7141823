"""Checks the handoff of a prompt from one process to another. KV goes layer by layer through host memory during the
prefill, or is copied on the GPU by CUDA IPC. The check passes if the tokens equal those of a single process.

The dtype is float32, so that tokens are comparable. Both processes create the same weights from the same seed.
"""

import json
import mmap
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.random_models import BLOCK_SIZE, Loaded, load, one_slice
from benchmarks.gpu_check.report import Row, guarded, skipped
from moonserve.engine.cuda.block_copier import BlockCopier
from moonserve.engine.kv_cache.tensors import KvTensors

_TIMEOUT_S = 120.0
_SEED = 7
_NEEDED_BYTES = 16 * 2**30  # for two models of 1B in float32


@dataclass(frozen=True, slots=True)
class _Work:
    """Parameters for the other process, which runs on the same machine."""

    shape: str
    device: str
    num_blocks: int
    used_blocks: int  # blocks of the prompt
    tokens: list[int]  # the prompt and the first token
    steps: int


def processes(bench: CheckContext) -> Iterator[Row]:
    ways = ("host staging",) if bench.device.type != "cuda" else ("host staging", "CUDA IPC")
    if bench.device.type == "cuda" and torch.cuda.mem_get_info(bench.device)[0] < _NEEDED_BYTES:
        yield skipped("handoff between processes", f"needs {_NEEDED_BYTES >> 30} GiB of GPU memory")
        return
    with TemporaryDirectory(dir="/dev/shm") as folder:  # a file on a disk cannot be pinned
        yield from _processes(bench, Path(folder) / "kv", ways)


def _processes(bench: CheckContext, path: Path, ways: tuple[str, ...]) -> Iterator[Row]:
    rehearses = bench.rehearses
    prompt = [(11 * n) % 251 for n in range(40 if rehearses else 2000)]
    used = -(-len(prompt) // BLOCK_SIZE)
    num_blocks = -(-(len(prompt) + bench.scale.generated + 1) // BLOCK_SIZE)
    shape = "tiny" if rehearses else "1B"
    own = _load(shape, num_blocks, bench.device)
    first = _read(own, prompt, used, _map(path, own.pool))
    moved = torch.stack([piece[:used] for piece in _pieces(own)])
    tokens = [*prompt, first]
    expected = _continue(own, tokens, bench.scale.generated)
    work = _Work(shape, str(bench.device), num_blocks, used, tokens, bench.scale.generated)
    for way in ways:
        sent = str(path) if way == "host staging" else moved
        yield guarded(
            f"handoff between processes, {way}",
            partial(_hand_over, work=work, sent=sent, size=moved.nbytes, expected=expected),
        )


def _read(own: Loaded, prompt: list[int], used: int, memory: KvTensors) -> int:
    """Prefills the prompt and stores each layer in host memory meanwhile. Returns the first token."""
    staging = BlockCopier(own.pool, memory)
    stored: list[int] = []

    def on_layer(layer: int) -> None:
        staging.store(layer, range(used), lambda: stored.append(layer))
        staging.flush(wait=False)

    [sampled] = own.engine.execute([one_slice(0, prompt, 0, range(own.pool.num_blocks))], on_layer)
    staging.flush(wait=True)
    if sampled is None or stored != list(range(own.pool.layout.num_layers)):
        raise RuntimeError(f"layers {stored} arrived")
    return sampled.token_id


def _map(path: Path, pool: KvTensors) -> KvTensors:
    """Maps a file that both processes share, with the pool's layout."""
    size = pool.layout.pool_bytes(pool.num_blocks)
    with path.open("a+b") as file:
        file.truncate(size)
        memory = memoryview(mmap.mmap(file.fileno(), size))
    return KvTensors(pool.layout, pool.num_blocks, memory, pool.device)


def _hand_over(name: str, work: _Work, sent: str | torch.Tensor, size: int, expected: list[int]) -> Row:
    context: Any = multiprocessing.get_context("spawn")
    arriving, answers = context.SimpleQueue(), context.Queue()
    other = context.Process(target=_decode, args=(work, arriving, answers), daemon=True)
    other.start()
    try:
        answers.get(timeout=_TIMEOUT_S)  # its model is loaded
        arriving.put(sent)
        taken_s, tokens = answers.get(timeout=_TIMEOUT_S)
    finally:
        other.join(timeout=10)
        if other.is_alive():
            other.kill()
    right = tokens == expected
    return Row(
        name=name,
        status="pass" if right else "fail",
        found=f"{size / 2**20:.0f} MiB fetched in {taken_s * 1e3:.1f} ms, {len(tokens)} tokens",
        asked="tokens of one process",
        reason="" if right else "tokens differ",
        figures={"bytes": size, "seconds": taken_s},
    )


def _decode(work: _Work, arriving: Any, answers: Any) -> None:
    """Runs in the other process: fetches the KV and continues the prompt."""
    device = torch.device(work.device)
    own = _load(work.shape, work.num_blocks, device)
    answers.put("ready")
    received = arriving.get()
    copier = BlockCopier(own.pool, _map(Path(received), own.pool)) if isinstance(received, str) else None
    began = time.perf_counter()
    if copier is not None:
        for layer in range(own.pool.layout.num_layers):
            copier.load(layer, range(work.used_blocks))()
    else:
        for piece, blocks in zip(_pieces(own), received, strict=True):
            piece[: len(blocks)].copy_(blocks)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken_s = time.perf_counter() - began
    answers.put((taken_s, _continue(own, work.tokens, work.steps)))


def _load(shape: str, num_blocks: int, device: torch.device) -> Loaded:
    torch.manual_seed(_SEED)
    return load(shape, "float32", num_blocks, device)


def _pieces(loaded: Loaded) -> list[torch.Tensor]:
    return [*loaded.pool.keys, *loaded.pool.values]


def _continue(loaded: Loaded, tokens: list[int], steps: int) -> list[int]:
    """Returns `steps` greedy tokens after `tokens`; the KV of all tokens but the last is in the pool."""
    everything = list(tokens)
    blocks = range(loaded.pool.num_blocks)
    for _ in range(steps):
        [sampled] = loaded.engine.execute([one_slice(0, everything, len(everything) - 1, blocks)])
        if sampled is None:
            raise RuntimeError("a step that samples gave no token")
        everything.append(sampled.token_id)
    return everything[len(tokens) :]


# Checks a whole cluster, started as by users, with workers on the device and handoffs through host memory. It passes
# if answers equal those of one engine on the same device, both computed and with a prefix from the cache.
#
# It uses the demo model in float32, so that tokens are comparable.

_BLOCK_SIZE = 32
_START_S = 300.0  # allows for other load on the machine
_REQUEST_TIMEOUT_S = 180.0
_DETERMINISTIC_FLAGS = (
    *("--store-reads", "always"),
    *("--ttft-slo", "10000", "--tbt-slo", "10000"),
)
"""Options that prevent rejections and recomputation because of slowness: only tokens are compared."""


def whole_cluster(bench: CheckContext) -> Iterator[Row]:
    name = "prefill and decode worker: tokens of one engine"
    try:
        import moonserve.deploy.launcher.serve  # noqa: F401 - fails if packages are missing
    except ImportError as error:
        yield skipped(name, f"the cluster's packages are not installed: {error}")
        return
    yield guarded(name, lambda name: _compare_cluster(name, bench))


def _compare_cluster(name: str, bench: CheckContext) -> Row:
    lengths = (1, 40) if bench.rehearses else (1, 31, 32, 500, 1500)
    prompts = [[(7 * n + length) % 250 + 2 for n in range(length)] for length in lengths]
    expected = _alone(bench, prompts)
    answers = _answers(bench, prompts)
    equal = sum(tokens == one for twice in answers for (tokens, _), one in zip(twice, expected, strict=True))
    cached = sum(cached for _, cached in answers[1])
    reusable = sum((length - 1) // _BLOCK_SIZE * _BLOCK_SIZE for length in lengths)
    is_right = equal == 2 * len(prompts) and cached == reusable
    return Row(
        name=name,
        status="pass" if is_right else "fail",
        found=f"{equal} of {2 * len(prompts)} answers, {cached} of {reusable} tokens cached",
        asked="all",
        reason="" if is_right else "tokens differ" if cached == reusable else "not cached",
        figures={"equal": equal, "cached": cached},
    )


def _alone(bench: CheckContext, prompts: list[list[int]]) -> list[list[int]]:
    from benchmarks.harness.generate import generate
    from moonserve.engine.engine import Engine
    from moonserve.engine.model.config import load_model_config
    from moonserve.models import demo_model_path
    from moonserve.protocol.request import SamplingParams

    path = demo_model_path()
    config = load_model_config(path)
    engine = Engine.load(
        path,
        config=config,
        layout=config.kv_layout(_BLOCK_SIZE, "float32"),
        num_blocks=160,
        device=str(bench.device),
    )
    sampling = SamplingParams(max_tokens=bench.scale.generated, temperature=0.0)
    return [one.token_ids for one in generate(engine, prompts, sampling)]


def _answers(bench: CheckContext, prompts: list[list[int]]) -> list[list[tuple[list[int], int]]]:
    """Sends all prompts twice. Returns per pass and prompt the tokens and the number of cached prompt tokens."""
    from moonserve.deploy.launcher.local_cluster import running_cluster

    rehearses = bench.device.type != "cuda"
    device = ("cpu-staged", "--kernels", "torch") if rehearses else ("cuda",)
    flags = ("--device", *device, "--dtype", "float32", "--async-scheduling")
    sizes = ("--kv-cache-memory", "64MiB", "--dram", "64MiB", "--block-size", str(_BLOCK_SIZE))
    with (
        TemporaryDirectory() as folder,
        running_cluster(
            None, *flags, *sizes, *_DETERMINISTIC_FLAGS, log_dir=Path(folder), start_timeout_s=_START_S
        ) as cluster,
    ):
        return [[_complete(cluster.url, prompt, bench.scale.generated) for prompt in prompts] for _ in range(2)]


def _complete(url: str, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    wish = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"prompt": prompt, "return_token_ids": True, **wish}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
