"""Rotary position embedding: the table of cosines and sines by position.

Frequencies and attention scaling follow `transformers.modeling_rope_utils`, so that a checkpoint means the same here.
A row of the table depends only on its position, not on the chunks of a prompt, so cached KV stays valid for every
continuation. With `dynamic`, position p gets the frequencies that token-by-token generation would have used.
"""

import math

import torch

from moonserve.engine.model.config.rope import RopeConfig


class RopeTable:
    """Tables of cosines, and of sines with the sign of rotate-half applied. They grow with longer sequences."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self._config = config
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._size = 0
        self._grow(min(config.max_position_embeddings, 4096))

    def rows(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (cos, signed sin) of `positions` [tokens], all below `end`; each [tokens, 1, head_dim]."""
        cos, sin = self.tables(end)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def tables(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (cos, signed sin) of at least the positions below `end`; contiguous [positions, 1, head_dim] each."""
        if end > self._size:
            self._grow(max(end, 2 * self._size))
        return self._cos, self._sin

    def _grow(self, size: int) -> None:
        positions = torch.arange(size)
        angles = positions[:, None].float() * frequencies(self._config, self._head_dim, positions)
        cos, sin = angles.cos(), angles.sin()
        scaling = self._config.attention_factor
        self._cos = self._place(torch.cat((cos, cos), -1) * scaling)
        self._sin = self._place(torch.cat((-sin, sin), -1) * scaling)
        self._size = size

    def _place(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self._device, self._dtype).unsqueeze(1)


def apply_rope(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotates `heads` [tokens, heads, head_dim]."""
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * cos, heads.roll(half, -1), signed_sin)


def frequencies(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Returns inverse frequencies [head_dim / 2], or one row per position for `dynamic`."""
    if config.rope_type == "dynamic":
        return _dynamic(config, head_dim, positions)
    plain = _plain(config.theta, head_dim)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, plain)
    return _yarn(config, head_dim) if config.rope_type == "yarn" else plain


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    inverse: torch.Tensor = 1.0 / (theta ** _exponents(head_dim))
    return inverse


def _dynamic(config: RopeConfig, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Applies NTK scaling: the base grows with the sequence once it exceeds the trained length."""
    trained = config.max_position_embeddings
    length = torch.clamp(positions + 1, min=trained)
    stretch = (config.factor * length / trained) - (config.factor - 1)
    base = config.theta * stretch ** (head_dim / (head_dim - 2))
    inverse: torch.Tensor = 1.0 / (base[:, None] ** _exponents(head_dim))
    return inverse


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Divides low frequencies by `factor`, keeps high ones and interpolates between (Llama 3.1)."""
    low, high = config.low_freq_factor, config.high_freq_factor
    context = config.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > context / low, plain / config.factor, plain)
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(between, blended, scaled)


def _yarn(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Applies YaRN (arXiv 2309.00071, section 3.2): a ramp over the dimensions from extrapolation to interpolation."""
    positive = config.theta ** _exponents(head_dim)
    low, high = _yarn_range(config, head_dim)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float) - low) / (high - low)
    extrapolated = 1 - ramp.clamp(0, 1)
    return (1.0 / (config.factor * positive)) * (1 - extrapolated) + (1.0 / positive) * extrapolated


def _yarn_range(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        context = config.original_max_position_embeddings
        turns = math.log(context / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001  # no division by zero
