"""Reads the latent attention of DeepSeek-V2 and V3 (arXiv 2405.04434, section 2.1) from config.json. No torch."""

from dataclasses import dataclass

from moonserve.engine.model.config.rope import score_factor
from moonserve.engine.model.model_folder import JsonFields


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """Widths of latent attention. A token has latents, from which keys and values of all heads are projected, and one
    rotated key. Queries are projected to the latents' space, and what they attend to from there to values."""

    rank: int  # of a token's latents
    rotary: int  # of the rotated key, and of the rotated part of each query
    plain: int  # of the other part of each query
    value: int  # of a head's value
    query_rank: int | None  # of the latents of queries; None: queries are projected from the hidden state
    is_interleaved: bool  # True: neighbours are rotated together; False: the halves are
    scale: float  # of scores

    @property
    def pooled(self) -> int:
        """Values of a token in the pool."""
        return self.rank + self.rotary

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Returns the number of weights in a layer's matrices and in the norms of latents."""
        queries, values = num_heads * (self.plain + self.rotary), num_heads * self.value
        first = hidden_size * queries if self.query_rank is None else self.query_rank * (hidden_size + queries + 1)
        return first + hidden_size * (self.pooled + values) + self.rank * (num_heads * (self.plain + self.value) + 1)


def latent_heads(fields: JsonFields) -> LatentHeads:
    rank, rotary = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    if rank % 2 or rotary % 2:
        raise fields.error(f"kv_lora_rank {rank} and qk_rope_head_dim {rotary} must be even")
    plain = fields.count("qk_nope_head_dim")
    return LatentHeads(
        rank=rank,
        rotary=rotary,
        plain=plain,
        value=fields.count("v_head_dim"),
        query_rank=fields.optional_count("q_lora_rank"),
        is_interleaved=fields.flag("rope_interleave", default=True),
        scale=(plain + rotary) ** -0.5 * score_factor(fields),
    )
