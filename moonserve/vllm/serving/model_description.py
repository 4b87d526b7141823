"""What a worker tells the cluster about the model that its vLLM engine loaded: layout, fingerprint, vocabulary.

The fingerprint stands for everything that determines KV. Weights are large, so it reads samples of each file. It
does not name the machine or the number of GPUs: workers with another tensor-parallel size make the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonserve.protocol.kv_blocks import DTYPE_BYTES, KvLayout

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_NAMES = {"float16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}  # by size: the layout has no float16


def layout_of(config: VllmConfig) -> KvLayout:
    """Returns the shape of a block as the conductor counts it. It only serves to predict bytes: MLA and hybrid models
    hold less than this."""
    model = config.model_config
    cache_dtype = str(config.cache_config.cache_dtype)
    dtype = _dtype_name(model.dtype)
    head_dim = model.get_head_size()
    if cache_dtype.startswith("fp8") and head_dim % DTYPE_BYTES["float32"] == 0:
        dtype = "fp8"
    return KvLayout(
        num_layers=max(1, model.get_total_num_hidden_layers()),
        block_size=config.cache_config.block_size,
        num_kv_heads=max(1, model.get_total_num_kv_heads()),
        head_dim=head_dim,
        dtype=_NAMES.get(dtype, dtype),
    )


def fingerprint_of(config: VllmConfig) -> str:
    """Returns the identity of model, computation and block size. Reads the model's folder."""
    model = config.model_config
    parts = (
        "moonserve-vllm-1",
        _dtype_name(model.dtype),
        str(config.cache_config.cache_dtype),
        str(config.cache_config.block_size),
        str(model.quantization),
        str(model.revision),
    )
    digest = hashlib.blake2b("|".join(parts).encode(), digest_size=16)
    for piece in _samples(Path(model.model)):
        digest.update(piece)
    return digest.hexdigest()


def eos_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """Returns the tokens with which the model ends an answer."""
    found: dict[int, None] = {}
    sources: list[Any] = [model.hf_text_config.eos_token_id, model.try_get_generation_config().get("eos_token_id")]
    for source in sources:
        if source is not None:
            found |= dict.fromkeys([source] if isinstance(source, int) else source)
    return tuple(found)


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _samples(folder: Path) -> Iterator[bytes]:
    """Yields names and sizes of the model's files, all of config.json, and samples of the weights."""
    if not folder.is_dir():  # a hub name: vLLM resolved it, and the name stands for the content
        yield str(folder).encode()
        return
    for path in sorted(folder.glob("*")):
        if path.name == "config.json":
            yield path.read_bytes()
        elif path.suffix in (".safetensors", ".bin", ".gguf"):
            size = path.stat().st_size
            yield f"{path.name}:{size}".encode()
            with path.open("rb") as file:
                for number in range(_SAMPLES):
                    file.seek(size * number // _SAMPLES)
                    yield file.read(_SAMPLE_BYTES)
