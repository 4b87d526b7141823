"""Trains the demo model on the running interpreter's standard library.

    python -m docs.demo_model.train --minutes 60 --compile

The budget is wall time: corpus, tokenizer and token stream are deterministic, the number of steps is not.
"""

import argparse
import csv
import json
import math
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from docs.demo_model import training_data
from docs.demo_model.tokenizer import train_tokenizer
from moonserve.models import demo_model_path

SEED = 20240229
NUM_THREADS = 2
PEAK_LEARNING_RATE, FINAL_LEARNING_RATE = 2e-3, 5e-5
WARM_UP_SHARE = 0.02  # of the time budget
SHORT, LONG = 512, 2048  # tokens of a sequence
LONG_SHARE = 0.1  # of the time budget, at its end
TOKENS_PER_STEP = 4096
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
STEPS_PER_ROW = 20  # of the loss curve
# For nine tenths of the run, positions stay below 512. A larger base in the shipped model than in training stretches
# the slow rotations over longer texts (NTK-aware scaling). Of 1e4, 2e4, 4e4, 8e4 and 16e4 the shipped 8e4 is best at
# 2,048 tokens: 3.20 nats against 3.63, for 0.06 nats at 512 tokens.
TRAINING_ROPE_THETA = 10000.0

CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files of the shipped model that a run starts from. They define about 5.2 million parameters."""

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def learning_rate(progress: float) -> float:
    """Returns the rate at a share of the budget: linear warm-up, then a cosine to the final rate (Loshchilov 2016)."""
    if progress < WARM_UP_SHARE:
        return PEAK_LEARNING_RATE * progress / WARM_UP_SHARE
    decay = min(1.0, (progress - WARM_UP_SHARE) / (1.0 - WARM_UP_SHARE))
    span = PEAK_LEARNING_RATE - FINAL_LEARNING_RATE
    return FINAL_LEARNING_RATE + span * 0.5 * (1.0 + math.cos(math.pi * decay))


def sequence_length(progress: float) -> int:
    """Returns the tokens per sequence; the end of the run uses long ones. The tokens per step stay the same."""
    return LONG if progress >= 1.0 - LONG_SHARE else SHORT


def make_model(**changes: object) -> LlamaForCausalLM:
    """Creates a model of the shipped architecture."""
    shipped = json.loads((demo_model_path() / "config.json").read_text(encoding="utf-8"))
    return LlamaForCausalLM(LlamaConfig.from_dict(shipped | changes))


class Trainer:
    """One training run within a time budget."""

    def __init__(self, source: training_data.TokenSource, minutes: float, loss: Loss) -> None:
        torch.manual_seed(SEED)
        # Weights are fp32: bf16 has too few digits to be updated.
        self.model = make_model(rope_theta=TRAINING_ROPE_THETA, torch_dtype="float32")
        self.rows: list[dict[str, float]] = []  # rows of the loss curve
        self.num_steps = 0
        self.elapsed_s = 0.0
        self._source = source
        self._budget_s = minutes * 60.0
        self._loss = loss
        self._optimizer = _optimizer(self.model)

    @property
    def progress(self) -> float:
        """Elapsed share of the budget."""
        return min(1.0, self.elapsed_s / self._budget_s)

    def run(self) -> None:
        """Trains until the budget is spent."""
        for length in (SHORT, LONG):  # compiles before the clock starts
            zeros = torch.zeros(TOKENS_PER_STEP // length, length + 1, dtype=torch.int64)
            torch.autograd.backward(self._loss(self.model, zeros))
            self._optimizer.zero_grad(set_to_none=True)
        losses: list[float] = []  # since the last row
        began = time.monotonic()
        for windows in self._batches():
            losses.append(self._step(windows))
            self.num_steps += 1
            self.elapsed_s = time.monotonic() - began
            if self.progress >= 1.0 or len(losses) == STEPS_PER_ROW:
                self._log(math.fsum(losses) / len(losses))
                losses = []
            if self.progress >= 1.0:
                return

    def _batches(self) -> Iterator[torch.Tensor]:
        """Yields batches, int64 [batch, length + 1]. A change of length starts a new epoch."""
        epoch = 0
        while True:
            length = sequence_length(self.progress)
            batch = TOKENS_PER_STEP // length
            stream = self._source.epoch_stream(epoch)
            starts = training_data.window_starts(len(stream), length, [SEED, epoch])
            for first in range(0, len(starts) - batch + 1, batch):
                if sequence_length(self.progress) != length:
                    break
                own = starts[first : first + batch]
                yield torch.from_numpy(training_data.cut_windows(stream, own, length))
            epoch += 1

    def _step(self, windows: torch.Tensor) -> float:
        """Trains one step. Returns the loss before it, in nats per token."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.progress)
        loss = self._loss(self.model, windows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _log(self, train_loss: float) -> None:
        row = {
            "step": self.num_steps,
            "elapsed_s": self.elapsed_s,
            "num_tokens": self.num_steps * TOKENS_PER_STEP,
            "learning_rate": learning_rate(self.progress),
            "sequence_length": sequence_length(self.progress),
            "train_loss": train_loss,
        }
        self.rows.append(row)
        print(f"{self.progress:.0%} {row}", flush=True)


def _optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Returns AdamW with weight decay on matrices only (norm gains are vectors)."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)


def language_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Returns the mean next-token loss in nats. `windows` is int64 [batch, length + 1]. Matrix products run in bf16,
    1.3 times as fast as fp32 on CPUs with AVX512-BF16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: torch.nn.Module, stream: np.ndarray, length: int) -> float:
    """Returns the mean loss over `stream` in nats per token, in windows of `length` tokens."""
    starts = np.arange(0, len(stream) - length, length, dtype=np.int64)
    batch = TOKENS_PER_STEP // length
    num_whole = len(starts) // batch  # equal batches, so means can be averaged
    losses = [
        language_loss(model, torch.from_numpy(training_data.cut_windows(stream, own, length))).item()
        for own in starts[: num_whole * batch].reshape(num_whole, batch)
    ]
    return math.fsum(losses) / len(losses)


def export(trainer: Trainer, record: dict[str, object], output: Path) -> None:
    """Writes the weights in bf16, the configuration files, and the training record and loss curve."""
    folder = output / "training"
    folder.mkdir(parents=True, exist_ok=True)
    for name in CONFIG_FILES:
        if output.resolve() != demo_model_path():
            shutil.copy(demo_model_path() / name, output)
    _write_json(folder / "training.json", record)
    with (folder / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(trainer.rows[0]))
        writer.writeheader()
        writer.writerows(trainer.rows)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in trainer.model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    weights = output / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors restricts it to its owner


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def describe_run(trainer: Trainer, stream: np.ndarray, num_bytes: int) -> dict[str, object]:
    """Returns the training record: the run's size, and losses over the held-out `stream` of `num_bytes` bytes, computed
    with the shipped form (bf16, its own rope_theta)."""
    model = make_model()
    model.load_state_dict({k: v.bfloat16() for k, v in trainer.model.state_dict().items()})
    losses = {length: validation_loss(model, stream, length) for length in (SHORT, LONG)}
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": SEED,
        "torch_version": torch.__version__,
        "num_steps": trainer.num_steps,
        "num_tokens": trainer.num_steps * TOKENS_PER_STEP,
        "elapsed_s": round(trainer.elapsed_s, 1),
        "validation": [
            {
                "sequence_length": length,
                "nats_per_token": round(nats, 4),
                "bits_per_byte": round(nats / math.log(2) * len(stream) / num_bytes, 4),
            }
            for length, nats in losses.items()
        ],
    }


def main() -> None:
    """Builds the corpus and tokenizer, trains and exports."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time budget")
    parser.add_argument("--output", type=Path, default=Path("models/demo"))
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_THREADS)
    files = training_data.read_files(Path(sysconfig.get_paths()["stdlib"]))
    training, validation = training_data.split_files(files)
    tokenizer = train_tokenizer(training.values())
    loss = torch.compile(language_loss, dynamic=False) if arguments.compile else language_loss
    trainer = Trainer(training_data.TokenSource(tokenizer, training, SEED), arguments.minutes, loss)
    trainer.run()
    held_out = training_data.TokenSource(tokenizer, validation, SEED).files_only()
    num_bytes = sum(len(text.encode()) for text in validation.values())
    export(trainer, describe_run(trainer, held_out, num_bytes), arguments.output)
    tokenizer.save(str(arguments.output / "tokenizer.json"))
    _write_json(arguments.output / "corpus.json", training_data.describe_corpus(training, validation))


if __name__ == "__main__":
    main()
