"""Compares the speed of attention, of copies to host memory and of whole models with the limits of the hardware, and
with transformers."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.random_models import BLOCK_SIZE, Loaded, json_config, load, one_slice
from benchmarks.gpu_check.report import Row, at_least, failed, guarded, skipped
from moonserve.engine.cuda.block_copier import BlockCopier
from moonserve.engine.kv_cache.tensors import KvTensors, allocate_memory
from moonserve.protocol.kv_blocks import KvLayout

# Measures the speed of attention: decode against memory bandwidth, prefill against the rate of matrix products and
# against torch's own attention, which needs contiguous K and V. One layer of an 8B model, bfloat16.

HEADS, KV_HEADS, HEAD_DIM, _ATTENTION_BLOCK_SIZE = 32, 8, 128, 32
DECODE_BAR = 0.5
"""Least share of copy bandwidth if K and V are far larger than any cache."""
PREFILL_BAR = 0.25
"""Least share of the matrix product's rate for prompts of thousands of tokens."""
_LARGE_BYTES = 512 * 2**20
_LARGE_TOKENS = 2048


def decode_attention_speed(bench: CheckContext) -> Iterator[Row]:
    for rows, context in bench.scale.decode:
        name = f"decode attention, {rows} × {context:,} tokens"
        yield guarded(name, partial(_decode_row, bench=bench, rows=rows, context=context))


def prefill_attention_speed(bench: CheckContext) -> Iterator[Row]:
    for tokens, cached in bench.scale.prefill:
        behind = f" behind {cached:,}" if cached else ""
        name = f"prefill attention, {tokens:,} tokens{behind}"
        yield guarded(name, partial(_prefill_row, bench=bench, tokens=tokens, cached=cached))


def _decode_row(name: str, bench: CheckContext, rows: int, context: int) -> Row:
    from moonserve.engine.cuda.attention_kernels import DecodeBatch, decode_attention, parts_for

    keys, values, tables = _pool(bench.device, rows, context)
    queries = _random(bench.device, rows, HEADS, HEAD_DIM)
    output = queries.new_empty(rows, HEADS * HEAD_DIM)
    ends = torch.full((rows,), context, dtype=torch.int32, device=bench.device)
    batch = DecodeBatch(tables, ends, parts_for(context, None))
    taken = bench.seconds(lambda: decode_attention(queries, keys, values, batch, None, output))
    read = rows * context * 2 * KV_HEADS * HEAD_DIM * keys.element_size()
    share = read / taken / bench.ceilings.copy_bytes_per_s
    bar = DECODE_BAR if read >= _LARGE_BYTES else 0.0
    found = f"{taken * 1e6:.0f} µs, {read / taken / 1e9:,.0f} GB/s, {share:.0%} of a copy"
    return at_least(name, share, bar, found, f"≥ {bar:.0%}" if bar else "")


def _prefill_row(name: str, bench: CheckContext, tokens: int, cached: int) -> Row:
    from moonserve.engine.cuda.attention_kernels import (
        ChunkBatch,
        plan_tiles,
        prefill_attention,
        shared_bytes_of,
        tiling_for,
    )

    keys, values, tables = _pool(bench.device, 1, cached + tokens)
    queries = _random(bench.device, tokens, HEADS, HEAD_DIM)
    output = queries.new_empty(tokens, HEADS * HEAD_DIM)
    group = HEADS // KV_HEADS
    tiling = tiling_for(HEAD_DIM, keys.element_size(), group, shared_bytes_of(bench.device))
    tiles = plan_tiles([(0, cached, cached + tokens)], tiling.tokens_per_tile(group))
    batch = ChunkBatch(tables, torch.from_numpy(tiles).to(bench.device))
    taken = bench.seconds(lambda: prefill_attention(queries, keys, values, batch, None, output))
    flops = 4 * HEADS * HEAD_DIM * (tokens * cached + tokens * (tokens + 1) // 2)
    share = flops / taken / bench.ceilings.flops_per_s
    bar = PREFILL_BAR if tokens >= _LARGE_TOKENS else 0.0
    found = f"{taken * 1e6:.0f} µs, {flops / taken / 1e12:.1f} TFLOP/s, {share:.0%} of a product"
    if cached == 0:
        found += f", {_torch_seconds(bench, queries) / taken:.2f}× torch's"
    return at_least(name, share, bar, found, f"≥ {bar:.0%}" if bar else "")


def _torch_seconds(bench: CheckContext, queries: torch.Tensor) -> float:
    own = queries.transpose(0, 1)[None]
    keys, values = (_random(bench.device, 1, KV_HEADS, queries.shape[0], HEAD_DIM) for _ in range(2))
    return bench.seconds(lambda: F.scaled_dot_product_attention(own, keys, values, is_causal=True, enable_gqa=True))


def _pool(device: torch.device, rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns K, V and scattered block tables of sequences of equal length."""
    per_row = -(-context // _ATTENTION_BLOCK_SIZE)
    shape = (rows * per_row, _ATTENTION_BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    tables = torch.randperm(rows * per_row).view(rows, per_row).int().to(device)
    return _random(device, *shape), _random(device, *shape), tables


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


# Measures copies of scattered blocks between GPU and host against one copy of as many bytes to or from pinned memory.

STAGING_BAR = 0.7
"""Least share of the rate of the plain copy."""


def staging_speed(bench: CheckContext) -> Iterator[Row]:
    rehearses = bench.rehearses
    layout = KvLayout(num_layers=8, block_size=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    num_blocks = 16 if rehearses else 1024
    pool = KvTensors(layout, num_blocks, None, bench.device)
    host = KvTensors(layout, num_blocks, allocate_memory(layout.pool_bytes(num_blocks)), bench.device)
    copier = BlockCopier(pool, host)
    blocks = torch.randperm(num_blocks)[: num_blocks // 4].tolist()
    nbytes = len(blocks) * layout.block_bytes
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.device.type == "cuda")
    ways = (
        ("to the host", lambda: copier.store_all(blocks), lambda: on_host.copy_(on_device, non_blocking=True)),
        ("to the GPU", lambda: copier.load_all(blocks), lambda: on_device.copy_(on_host, non_blocking=True)),
    )
    for way, own, plain in ways:
        name = f"staging of {len(blocks)} scattered blocks {way}"
        yield guarded(name, partial(_staging_row, bench=bench, nbytes=nbytes, own=own, plain=plain))


def _staging_row(
    name: str, bench: CheckContext, nbytes: int, own: Callable[[], object], plain: Callable[[], object]
) -> Row:
    taken, least = bench.seconds(own), bench.seconds(plain)
    bar = 0.0 if bench.rehearses else STAGING_BAR
    found = f"{nbytes / taken / 1e9:.1f} GB/s, {least / taken:.0%} of a pinned copy"
    return at_least(name, least / taken, bar, found, f"≥ {bar:.0%}" if bar else "")


PEER_BAR = 1.0
"""Least ratio to the tokens per second of transformers."""
_SPARE_BYTES = 4 * 2**30  # for activations and other memory of the process


def model_speed(bench: CheckContext) -> Iterator[Row]:
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
        yield from (_model_row(f"{shape}: {what}", *own[what], peer.get(what), bar) for what in own)


def _model_row(name: str, tokens: int, taken: float, least: float, peer: Any, bar: float) -> Row:
    """Returns the row of one measurement. `peer`: seconds of transformers, or the reason why there are none."""
    found = f"{tokens / taken:,.0f} tokens/s, {least / taken:.0%} of the limit"
    if isinstance(peer, str):
        return at_least(name, 0, 0, f"{found}; {peer}", "")
    ratio = peer / taken
    asked = f"≥ {bar:.1f}× transformers" if bar else ""
    return at_least(name, ratio, bar, f"{found}, {ratio:.2f}× transformers", asked)


def _lacks_memory(bench: CheckContext, shape: str) -> str:
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


def _pool_blocks(bench: CheckContext) -> int:
    decode = max(batch * -(-context // BLOCK_SIZE) for batch, context in bench.scale.model_decode)
    return max(decode, -(-bench.scale.model_prefill // BLOCK_SIZE))


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- ours


def _own_times(bench: CheckContext, shape: str) -> dict[str, tuple[int, float, float]]:
    """Returns (tokens, seconds, least possible seconds) by name of the measurement."""
    loaded = load(shape, "bfloat16", _pool_blocks(bench), bench.device)
    times = {_prefill_name(bench): _own_prefill(bench, loaded)}
    for batch, context in bench.scale.model_decode:
        times[_decode_name(batch, context)] = _own_decode(bench, loaded, batch, context)
    return times


def _own_prefill(bench: CheckContext, loaded: Loaded) -> tuple[int, float, float]:
    length = bench.scale.model_prefill
    slices = [one_slice(0, _tokens(length), 0, range(-(-length // BLOCK_SIZE)))]
    taken = bench.seconds(lambda: loaded.engine.execute(slices))
    config = loaded.engine.config
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    flops = 2 * loaded.product_weights * length + attention
    return length, taken, flops / bench.ceilings.flops_per_s


def _own_decode(bench: CheckContext, loaded: Loaded, batch: int, context: int) -> tuple[int, float, float]:
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


def _prefill_name(bench: CheckContext) -> str:
    return f"prefill of {bench.scale.model_prefill:,} tokens"


def _decode_name(batch: int, context: int) -> str:
    return f"decode, {batch} × {context:,} tokens"


# -- transformers


def _peer_times(bench: CheckContext, shape: str) -> dict[str, float | str]:
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


def _peer(bench: CheckContext, shape: str) -> Any:
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
