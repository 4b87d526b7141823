"""Prompt of the request that the guest's cluster gets, and its answer by transformers; passed in the results folder."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from moonserve.models import demo_model_path

PROMPT = "import os\n\ndef list_files(path):\n" * 4
NUM_TOKENS = 8
_FILE = "expected.json"


@dataclass(frozen=True)
class Expected:
    prompt: list[int]
    answer: list[int]
    """Greedy tokens, computed in float32."""

    @classmethod
    def compute(cls) -> "Expected":
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = demo_model_path()
        prompt: list[int] = AutoTokenizer.from_pretrained(path)(PROMPT)["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        return cls(prompt, output[0, len(prompt) :].tolist())

    @classmethod
    def read(cls, folder: Path) -> "Expected":
        return cls(**json.loads((folder / _FILE).read_text()))

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)))
