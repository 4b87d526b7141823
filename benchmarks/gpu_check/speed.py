"""Compares tokens/s of whole models with the limits of memory and matrix units, and with transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.models import BLOCK_SIZE, Loaded, json_config, load, one_slice
from benchmarks.gpu_check.rows import Row, at_least, failed, skipped

PEER_BAR = 1.0
"""Least ratio to the tokens per second of transformers."""
_SPARE_BYTES = 4 * 2**30  # for activations and other memory of the process


def models(bench: Bench) -> Iterator[Row]:
    """Measures prefill and decode of each model."""
    for shape in bench.scale.models:
        lacking = _lacks_memory(bench, shape)
        if lacking:
            yield skipped(f"{shape} model", lacking)
            continue
        try:
            own = _own_times(bench, shape)
            _forget()
            peer = _peer_times(bench, shape)
            _forget()
        except Exception as error:  # the other models still run
            yield failed(f"{shape} model", error)
            continue
        # The speed of Triton's interpreter is meaningless.
        bar = PEER_BAR if bench.device.type == "cuda" else 0.0
        yield from (_row(f"{shape}: {what}", *own[what], peer.get(what), bar) for what in own)


def _row(name: str, tokens: int, taken: float, least: float, peer: Any, bar: float) -> Row:
    """Returns the row of one measurement. `peer`: seconds of transformers, or the reason why there are none."""
    found = f"{tokens / taken:,.0f} tokens/s, {least / taken:.0%} of the limit"
    if isinstance(peer, str):
        return at_least(name, 0, 0, f"{found}; {peer}", "")
    ratio = peer / taken
    asked = f"≥ {bar:.1f}× transformers" if bar else ""
    return at_least(name, ratio, bar, f"{found}, {ratio:.2f}× transformers", asked)


def _lacks_memory(bench: Bench, shape: str) -> str:
    if bench.device.type != "cuda":
        return ""
    config = json_config(shape)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    per_layer = hidden * (3 * config["intermediate_size"] + 3 * hidden)
    embeddings = 2 * config["vocab_size"] * hidden
    needed = 2 * (layers * per_layer + embeddings) + _pool_blocks(bench) * 2**22 + _SPARE_BYTES
    free = torch.cuda.mem_get_info(bench.device)[0]
    if free >= needed:
        return ""
    return f"needs {needed / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free"


def _pool_blocks(bench: Bench) -> int:
    decode = max(batch * -(-context // BLOCK_SIZE) for batch, context in bench.scale.model_decode)
    return max(decode, -(-bench.scale.model_prefill // BLOCK_SIZE))


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- ours


def _own_times(bench: Bench, shape: str) -> dict[str, tuple[int, float, float]]:
    """Returns (tokens, seconds, least possible seconds) by name of the measurement."""
    loaded = load(shape, "bfloat16", _pool_blocks(bench), bench.device)
    times = {_prefill_name(bench): _own_prefill(bench, loaded)}
    for batch, context in bench.scale.model_decode:
        times[_decode_name(batch, context)] = _own_decode(bench, loaded, batch, context)
    return times


def _own_prefill(bench: Bench, loaded: Loaded) -> tuple[int, float, float]:
    length = bench.scale.model_prefill
    slices = [one_slice(0, _tokens(length), 0, range(-(-length // BLOCK_SIZE)))]
    taken = bench.seconds(lambda: loaded.engine.execute(slices))
    config = loaded.engine.config
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    flops = 2 * loaded.product_weights * length + attention
    return length, taken, flops / bench.ceilings.flops_per_s


def _own_decode(bench: Bench, loaded: Loaded, batch: int, context: int) -> tuple[int, float, float]:
    per_row = -(-context // BLOCK_SIZE)
    slices = [
        one_slice(row, _tokens(context), context - 1, range(row * per_row, (row + 1) * per_row)) for row in range(batch)
    ]
    taken = bench.seconds(lambda: loaded.engine.execute(slices))
    layout = loaded.pool.layout
    read = loaded.product_bytes() + batch * context * layout.block_bytes // layout.block_size
    return batch, taken, read / bench.ceilings.copy_bytes_per_s


def _tokens(length: int) -> list[int]:
    return [token % 251 for token in range(length)]


def _prefill_name(bench: Bench) -> str:
    return f"prefill of {bench.scale.model_prefill:,} tokens"


def _decode_name(batch: int, context: int) -> str:
    return f"decode, {batch} × {context:,} tokens"


# -- transformers


def _peer_times(bench: Bench, shape: str) -> dict[str, float | str]:
    """Returns the seconds of transformers for the same work, or the reason why there are none."""
    names = [_prefill_name(bench), *(_decode_name(*one) for one in bench.scale.model_decode)]
    try:
        model = _peer(bench, shape)
    except ImportError:
        return dict.fromkeys(names, "transformers is not installed")
    times: dict[str, float | str] = {}
    with torch.inference_mode():
        tokens = torch.tensor([_tokens(bench.scale.model_prefill)], device=bench.device)
        times[names[0]] = bench.seconds(lambda: model(tokens, use_cache=True, logits_to_keep=1))
        for batch, context in bench.scale.model_decode:
            step = _peer_step(model, batch, context, bench.device)
            times[_decode_name(batch, context)] = bench.seconds(step)
    return times


def _peer(bench: Bench, shape: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {key: value for key, value in json_config(shape).items() if key != "torch_dtype"}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with bench.device:
            model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    finally:
        torch.set_default_dtype(default)
    return model.eval()


def _peer_step(model: Any, batch: int, context: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Returns a function that runs one greedy decode step; the context keeps its length."""
    tokens = torch.tensor([_tokens(context - 1)] * batch, device=device)
    cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
    last = tokens[:, -1:]

    def step() -> torch.Tensor:
        logits = model(last, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        chosen: torch.Tensor = logits[:, -1].argmax(-1).cpu()
        return chosen

    return step
