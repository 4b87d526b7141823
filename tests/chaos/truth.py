"""What clients ask for, and the tokens that each must get, computed by one coupled engine before the cluster starts.

Prompts and arrivals are a trace's, shortened. Native kernels compute the same bits in any chunks (ARCHITECTURE.md,
invariant 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.generate import generate
from engine.config import load_model_config
from engine.engine import Engine
from protocol.request import SamplingParams
from traces.format import TraceRecord, read_trace
from traces.prompts import PromptBuilder

BLOCK_SIZE = 16
NUM_BLOCKS = 4_096
MAX_PROMPT, MAX_OUTPUT = 400, 48
SYNTHETIC = Path(__file__).parents[1] / "traces" / "synthesis" / "small.jsonl"
SHORTENED = 1 / 24
"""Prompts: of a thousand tokens remain some forty."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One request."""

    prompt: list[int]
    tokens: list[int]  # that it must get

    def body(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "max_tokens": len(self.tokens),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }


def wishes(model: Path, trace: Path, count: int) -> list[Wish]:
    """Of the first `count` requests of the trace."""
    config = load_model_config(model)
    records = [_shortened(record) for record in read_trace(trace, count)]
    builder = PromptBuilder(config.vocab_size)
    prompts = [builder.prompt(record) for record in records]
    outputs = [record.output_length for record in records]
    engine = Engine.load(
        model,
        config=config,
        layout=config.kv_layout(BLOCK_SIZE, "float32"),
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        kernels="native",
    )
    wanted = [SamplingParams(max_tokens=output, temperature=0.0) for output in outputs]
    found = generate(engine, prompts, wanted)
    return [Wish(prompt, each.token_ids) for prompt, each in zip(prompts, found, strict=True)]


def _shortened(record: TraceRecord) -> TraceRecord:
    shorter = record.scaled(SHORTENED, 1 / 8, 1.0)
    return TraceRecord(
        arrived_s=shorter.arrived_s,
        input_length=min(shorter.input_length, MAX_PROMPT),
        output_length=max(4, min(shorter.output_length, MAX_OUTPUT)),
        hash_ids=shorter.hash_ids,
        tokens_per_hash=shorter.tokens_per_hash,
    )
