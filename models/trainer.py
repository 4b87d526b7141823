"""The training loop of the demo model.

Owns the model, its optimizer and the clock. The budget is wall time (see ``schedule.py``): the
corpus, the tokenizer and the token stream are deterministic, the number of steps is not.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from models import checkpoint, corpus, loss_log, packing
from models.checkpoint import Progress
from models.schedule import Interval, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """All that a run is made from, beside the corpus."""

    work_directory: Path
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
        self.model = LlamaForCausalLM(LlamaConfig.from_dict(checkpoint.training_architecture()))
        self.optimizer = build_optimizer(self.model, config)
        self.source = packing.TokenSource(tokenizer, files.training, config.seed)
        self.validation_stream = packing.file_stream(tokenizer, files.validation)
        self.progress = Progress()
        self.loss_path = config.work_directory / "loss.csv"
        self._training_loss = language_loss
        if config.compile:
            self._training_loss = torch.compile(language_loss, dynamic=False)
        self._losses: list[float] = []  # of the steps since the last log row
        self._logged_elapsed_s = 0.0

    def resume(self) -> None:
        """Continue from the work directory's checkpoint."""
        self.progress = checkpoint.load_checkpoint(
            self.config.work_directory, self.model, self.optimizer
        )
        self._logged_elapsed_s = self.progress.elapsed_s
        loss_log.drop_rows_after(self.loss_path, self.progress.step)

    def share_done(self) -> float:
        """The elapsed share of the time budget, from 0 to 1."""
        return min(1.0, self.progress.elapsed_s / (self.config.minutes * 60.0))

    def run(self) -> None:
        """Train until the time budget is spent; a run that is over stays as it is."""
        if self.share_done() >= 1.0:
            return
        self._warm_up()
        stepped_at = time.monotonic()
        validation_due = Interval(self.config.validation_interval_s, stepped_at)
        save_due = Interval(self.config.checkpoint_interval_s, stepped_at)
        for windows in self._batches():
            self._losses.append(self._train_step(windows))
            now = time.monotonic()
            self._advance(now - stepped_at)
            stepped_at = now
            is_over = self.share_done() >= 1.0
            if is_over or len(self._losses) == self.config.log_interval_steps:
                self._log(validates=is_over or validation_due.take(now))
            if is_over or save_due.take(now):
                self._save()
            if is_over:
                return

    def _warm_up(self) -> None:
        """Run each batch shape once without learning, so that compiling is not training time."""
        schedule = self.config.schedule
        for share in (0.0, 1.0):
            shape = (schedule.batch_size(share), schedule.sequence_length(share) + 1)
            torch.autograd.backward(self._training_loss(self.model, torch.zeros(shape).long()))
            self.optimizer.zero_grad(set_to_none=True)

    def _batches(self) -> Iterator[torch.Tensor]:
        """Yield batches, int64 [batch_size, sequence_length + 1], as the schedule asks."""
        while True:
            sequence_length = self.config.schedule.sequence_length(self.share_done())
            if self.progress.sequence_length not in (0, sequence_length):
                self._start_epoch()
            self.progress.sequence_length = sequence_length
            yield from self._epoch_batches(sequence_length)

    def _epoch_batches(self, sequence_length: int) -> Iterator[torch.Tensor]:
        """Yield batches until the epoch ends or the schedule asks for another length."""
        progress, schedule = self.progress, self.config.schedule
        stream = self.source.epoch_stream(progress.epoch)
        order = packing.window_order(len(stream), sequence_length, self.config.seed, progress.epoch)
        batch_size = schedule.tokens_per_step // sequence_length
        while progress.num_windows_taken + batch_size <= len(order):
            if schedule.sequence_length(self.share_done()) != sequence_length:
                return
            starts = order[progress.num_windows_taken :][:batch_size]
            progress.num_windows_taken += batch_size
            yield torch.from_numpy(packing.cut_windows(stream, starts, sequence_length))
        self._start_epoch()

    def _start_epoch(self) -> None:
        self.progress.epoch += 1
        self.progress.num_windows_taken = 0

    def _train_step(self, windows: torch.Tensor) -> float:
        """One optimizer step on ``windows``; returns the loss before it, in nats per token."""
        learning_rate = self.config.schedule.learning_rate(self.share_done())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self._training_loss(self.model, windows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _advance(self, step_s: float) -> None:
        self.progress.step += 1
        self.progress.num_tokens += self.config.schedule.tokens_per_step
        self.progress.elapsed_s += step_s

    def _save(self) -> None:
        checkpoint.save_checkpoint(
            self.config.work_directory, self.model, self.optimizer, self.progress
        )

    def _validation_loss(self) -> float:
        sequence_length = self.config.schedule.short_sequence_length
        return validation_loss(self.model, self.validation_stream, sequence_length)

    def _log(self, *, validates: bool) -> None:
        """Write a row of the loss curve over the steps since the last one."""
        schedule, progress = self.config.schedule, self.progress
        num_tokens = len(self._losses) * schedule.tokens_per_step
        row = loss_log.LossRow(
            step=progress.step,
            elapsed_s=progress.elapsed_s,
            num_tokens=progress.num_tokens,
            tokens_per_s=num_tokens / (progress.elapsed_s - self._logged_elapsed_s),
            learning_rate=schedule.learning_rate(self.share_done()),
            sequence_length=progress.sequence_length,
            train_loss=math.fsum(self._losses) / len(self._losses),
            validation_loss=self._validation_loss() if validates else None,
        )
        self._losses, self._logged_elapsed_s = [], progress.elapsed_s
        loss_log.append_row(self.loss_path, row)
        left_s = self.config.minutes * 60.0 - progress.elapsed_s
        print(f"{self.share_done():.0%}, {max(0.0, left_s) / 60:.0f} min left: {row}", flush=True)


@torch.no_grad()
def validation_loss(model: torch.nn.Module, stream: np.ndarray, sequence_length: int) -> float:
    """Mean loss over ``stream``, in nats per token, in windows of ``sequence_length`` tokens."""
    losses = [
        language_loss(
            model, torch.from_numpy(packing.cut_windows(stream, starts, sequence_length))
        ).item()
        for starts in packing.validation_starts(len(stream), sequence_length)
    ]
    return math.fsum(losses) / len(losses)


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
