"""Checks a whole cluster, started as by users, with workers on the device and handoffs through host memory. It passes
if answers equal those of one engine on the same device, both computed and with a prefix from the cache.

It uses the demo model in float32, so that tokens are comparable.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu_check.bench import REHEARSAL, Bench
from benchmarks.gpu_check.rows import Row, guarded, skipped

_BLOCK_SIZE = 32
_START_S = 300.0  # allows for other load on the machine
_TIMEOUT_S = 180.0
_UNHURRIED = (
    *("--store-reads", "always"),
    *("--ttft-slo", "10000", "--tbt-slo", "10000"),
)
"""Options that prevent rejections and recomputation because of slowness: only tokens are compared."""


def cluster(bench: Bench) -> Iterator[Row]:
    name = "prefill and decode worker: tokens of one engine"
    try:
        import deploy.serve  # noqa: F401 - fails if packages are missing
    except ImportError as error:
        yield skipped(name, f"the cluster's packages are not installed: {error}")
        return
    yield guarded(name, lambda name: _compare(name, bench))


def _compare(name: str, bench: Bench) -> Row:
    lengths = (1, 40) if bench.scale is REHEARSAL else (1, 31, 32, 500, 1500)
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


def _alone(bench: Bench, prompts: list[list[int]]) -> list[list[int]]:
    from benchmarks.generate import generate
    from engine.config import load_model_config
    from engine.engine import Engine
    from models import demo_model_path
    from protocol.request import SamplingParams

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


def _answers(bench: Bench, prompts: list[list[int]]) -> list[list[tuple[list[int], int]]]:
    """Sends all prompts twice. Returns per pass and prompt the tokens and the number of cached prompt tokens."""
    from deploy.local import running

    rehearses = bench.device.type != "cuda"
    device = ("cpu-staged", "--kernels", "torch") if rehearses else ("cuda",)
    flags = ("--device", *device, "--dtype", "float32", "--async-scheduling")
    sizes = ("--kv-cache-memory", "64MiB", "--dram", "64MiB", "--block-size", str(_BLOCK_SIZE))
    with (
        TemporaryDirectory() as folder,
        running(None, *flags, *sizes, *_UNHURRIED, log_dir=Path(folder), start_timeout_s=_START_S) as cluster,
    ):
        return [[_ask(cluster.url, prompt, bench.scale.generated) for prompt in prompts] for _ in range(2)]


def _ask(url: str, prompt: list[int], num_tokens: int) -> tuple[list[int], int]:
    wish = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"prompt": prompt, "return_token_ids": True, **wish}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]
