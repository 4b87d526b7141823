"""Options of `moonserve profile`, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass

from engine.format_config import FormatConfig
from protocol.config import option, require_at_least_1
from protocol.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(FormatConfig):
    """Options of `moonserve profile`; those that a worker has too mean the same."""

    model: str | None = option(
        None, help="local Hugging Face folder or hub name; the demo model when not given"
    )
    json: str | None = option(None, help="file for the profile, as moonserve simulate reads it")
    name: str | None = option(None, help="name of the profile; the model's when not given")
    kv_cache_memory: int = option(256 * MIB, help="bytes of KV of a worker", unit="bytes")
    dram: int = option(512 * MIB, help="bytes of KV of a store node", unit="bytes")
    max_num_seqs: int = option(64, help="sequences in one decode batch")
    max_num_batched_tokens: int = option(512, help="tokens of prompt computed in one step")
    num_threads: int = option(1, help="compute threads")
    cache_dir: str | None = option(
        None, help="folder that keeps compiled kernels; ~/.cache/moonserve when not given"
    )
    disk: str | None = option(
        None, help="folder whose disk is measured; that of temporary files when not given"
    )
    budget_s: float = option(120.0, help="seconds for the model's steps; more make longer prompts")
    clock: str = option(
        "wall",
        help="cpu = the process's own time, on a machine that is busy with other things",
        choices=("wall", "cpu"),
    )
    serving: bool = option(
        False, help="measure through a cluster on this machine, with all that serving adds"
    )
    prefill_workers: int = option(1, help="with --serving: its prefill workers")
    decode_workers: int = option(1, help="with --serving: its decode workers")
    load_prompt_tokens: int = option(
        512, help="with --serving: mean length of the prompts that will come"
    )
    load_answer_tokens: int = option(64, help="with --serving: likewise of the answers")

    def __post_init__(self) -> None:
        require_at_least_1(
            self,
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
            "prefill_workers",
            "decode_workers",
            "load_prompt_tokens",
            "load_answer_tokens",
        )
        if self.serving and self.clock != "wall":
            raise ConfigError("--serving sees what a client sees: it needs --clock wall")
        if not self.budget_s > 0:
            raise ConfigError("--budget-s must be above 0")
        if self.clock == "cpu" and self.num_threads > 1:
            raise ConfigError("--clock cpu adds up all threads: it needs --num-threads 1")
