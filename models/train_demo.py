"""Trains the demo model on the running interpreter's standard library.

    python -m models.train_demo --minutes 60 --work-directory build/demo --output models/demo

Owns the training loop and the command line. The budget is wall time (see ``schedule.py``); the
corpus, the tokenizer and the token stream are deterministic, the number of steps is not.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from models import checkpoint, corpus, loss_log, packing
from models.checkpoint import Progress
from models.schedule import Schedule
from models.train_tokenizer import save_tokenizer, train_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """All that a run is made from, beside the corpus."""

    work_directory: Path
    output: Path
    minutes: float = 60.0
    seed: int = 20240229
    num_threads: int = 2
    compile: bool = False
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    log_interval_steps: int = 20
    validation_interval_s: float = 240.0
    checkpoint_interval_s: float = 300.0
    schedule: Schedule = field(default_factory=Schedule)


class Trainer:
    """One run: the model, its optimizer, the token source and how far it has come."""

    def __init__(self, config: TrainingConfig, files: corpus.Corpus, tokenizer: Tokenizer) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.model = LlamaForCausalLM(LlamaConfig(**checkpoint.architecture()))
        self.model.float()
        self.optimizer = build_optimizer(self.model, config)
        self.training_loss = language_loss
        if config.compile:
            self.training_loss = torch.compile(language_loss, dynamic=False)
        self.source = packing.TokenSource(tokenizer, files.training, config.seed)
        self.validation = packing.file_stream(tokenizer, files.validation)
        self.num_validation_bytes = sum(len(file.text.encode()) for file in files.validation)
        self.progress = Progress()
        self.loss_path = config.work_directory / "loss.csv"

    def resume(self) -> None:
        """Continue from the work directory's checkpoint."""
        self.progress = checkpoint.load_checkpoint(
            self.config.work_directory, self.model, self.optimizer
        )
        loss_log.drop_rows_after(self.loss_path, self.progress.step)

    def warm_up(self) -> None:
        """Run each batch shape once without learning, so that compiling is not training time."""
        schedule = self.config.schedule
        for share in (0.0, 1.0):
            shape = (schedule.batch_size(share), schedule.sequence_length(share) + 1)
            self.training_loss(self.model, torch.zeros(shape, dtype=torch.int64)).backward()
            self.optimizer.zero_grad(set_to_none=True)

    def share_done(self) -> float:
        """The elapsed share of the time budget, from 0 to 1."""
        return min(1.0, self.progress.elapsed_s / (self.config.minutes * 60.0))

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield batches, int64 [batch_size, sequence_length + 1], as the schedule asks."""
        progress = self.progress
        while True:
            sequence_length = self.config.schedule.sequence_length(self.share_done())
            if progress.sequence_length not in (0, sequence_length):
                progress.epoch, progress.num_windows_taken = progress.epoch + 1, 0
            progress.sequence_length = sequence_length
            yield from self._epoch_batches(sequence_length)

    def _epoch_batches(self, sequence_length: int) -> Iterator[torch.Tensor]:
        """Yield batches until the epoch ends or the schedule asks for another length."""
        progress, schedule = self.progress, self.config.schedule
        stream = self.source.epoch_stream(progress.epoch)
        order = packing.window_order(
            len(stream), sequence_length, self.config.seed, progress.epoch
        )
        batch_size = schedule.tokens_per_step // sequence_length
        while progress.num_windows_taken + batch_size <= len(order):
            if schedule.sequence_length(self.share_done()) != sequence_length:
                return
            first = progress.num_windows_taken
            progress.num_windows_taken += batch_size
            starts = order[first : first + batch_size]
            yield torch.from_numpy(packing.cut_windows(stream, starts, sequence_length))
        progress.epoch, progress.num_windows_taken = progress.epoch + 1, 0

    def train_step(self, windows: torch.Tensor) -> float:
        """One optimizer step on ``windows``; returns the loss before it, in nats per token."""
        learning_rate = self.config.schedule.learning_rate(self.share_done())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self.training_loss(self.model, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    @torch.no_grad()
    def validation_loss(self, sequence_length: int) -> float:
        """Mean loss over the held-out files, in nats per token, in windows of that length."""
        starts = packing.validation_starts(len(self.validation), sequence_length)
        losses = [
            language_loss(
                self.model,
                torch.from_numpy(packing.cut_windows(self.validation, chunk, sequence_length)),
            ).item()
            for chunk in starts
        ]
        return math.fsum(losses) / len(losses)

    def run(self) -> None:
        """Train until the time budget is spent."""
        config, progress = self.config, self.progress
        last_validated_at = last_saved_at = last_step_at = last_logged_at = time.monotonic()
        losses: list[float] = []
        for windows in self.batches():
            losses.append(self.train_step(windows))
            now = time.monotonic()
            progress.elapsed_s += now - last_step_at
            last_step_at = now
            progress.step += 1
            progress.num_tokens += config.schedule.tokens_per_step
            is_over = self.share_done() >= 1.0
            if len(losses) == config.log_interval_steps or is_over:
                validation_loss = None
                tokens_per_s = len(losses) * config.schedule.tokens_per_step / (now - last_logged_at)
                if now - last_validated_at >= config.validation_interval_s or is_over:
                    validation_loss = self.validation_loss(config.schedule.short_sequence_length)
                    last_validated_at = now
                self._log(losses, tokens_per_s, validation_loss)
                losses, last_logged_at = [], time.monotonic()
            if now - last_saved_at >= config.checkpoint_interval_s or is_over:
                checkpoint.save_checkpoint(
                    config.work_directory, self.model, self.optimizer, progress
                )
                last_saved_at = now
            if is_over:
                return

    def _log(self, losses: list[float], tokens_per_s: float, validation: float | None) -> None:
        row = loss_log.LossRow(
            step=self.progress.step,
            elapsed_s=self.progress.elapsed_s,
            num_tokens=self.progress.num_tokens,
            tokens_per_s=tokens_per_s,
            learning_rate=self.config.schedule.learning_rate(self.share_done()),
            sequence_length=self.progress.sequence_length,
            train_loss=math.fsum(losses) / len(losses),
            validation_loss=validation,
        )
        loss_log.append_row(self.loss_path, row)
        print(row, flush=True)


def build_optimizer(model: torch.nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (norm gains are vectors)."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, fused=True)


def language_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss in nats; ``windows`` is int64 [batch_size, sequence_length + 1].

    Matrix products run in bf16: 1.3 times as fast as fp32 where the CPU has AVX512-BF16.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def prepare(config: TrainingConfig) -> tuple[corpus.Corpus, Tokenizer]:
    """Read the corpus, train the tokenizer, and put the record of both in the work directory."""
    config.work_directory.mkdir(parents=True, exist_ok=True)
    files = corpus.load_corpus(corpus.standard_library_root())
    tokenizer = train_tokenizer(file.text for file in files.training)
    save_tokenizer(tokenizer, config.work_directory)
    checkpoint.write_json(config.work_directory / "corpus.json", corpus.describe(files))
    return files, tokenizer


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="training time budget")
    parser.add_argument("--work-directory", type=Path, default=Path("build/demo-training"))
    parser.add_argument("--output", type=Path, default=Path("models/demo"))
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint and end")
    return parser.parse_args()


def main() -> None:
    """Train and export, or only export."""
    arguments = parse_arguments()
    config = TrainingConfig(
        work_directory=arguments.work_directory,
        output=arguments.output,
        minutes=arguments.minutes,
        compile=arguments.compile,
    )
    if arguments.export_only:
        checkpoint.export_checkpoint(config.work_directory, config.output)
        return
    torch.set_num_threads(config.num_threads)
    trainer = Trainer(config, *prepare(config))
    if arguments.resume:
        trainer.resume()
    trainer.warm_up()
    trainer.run()
    checkpoint.export_checkpoint(config.work_directory, config.output)


if __name__ == "__main__":
    main()
