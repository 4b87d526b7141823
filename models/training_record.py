"""Writes the record of a finished run: ``training.json``, the loss curve and its plot."""

import math
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models import checkpoint, loss_log, packing
from models.checkpoint import write_json
from models.corpus import Corpus
from models.trainer import Trainer, validation_loss


def write_record(trainer: Trainer, files: Corpus, directory: Path) -> None:
    """Write the record of ``trainer``'s run into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "training.json", describe_run(trainer, files))
    shutil.copyfile(trainer.loss_path, directory / "loss.csv")
    loss_log.plot(directory / "loss.csv", directory / "loss.png")


def describe_run(trainer: Trainer, files: Corpus) -> dict[str, object]:
    """Hyper-parameters and results of a run."""
    config, progress = trainer.config, trainer.progress
    return {
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "seed": config.seed,
        "minutes": config.minutes,
        "optimizer": "AdamW",
        "betas": list(config.betas),
        "weight_decay": config.weight_decay,
        "max_gradient_norm": config.max_gradient_norm,
        "schedule": asdict(config.schedule),
        "chat_share": packing.CHAT_SHARE,
        "snippet_share": packing.SNIPPET_SHARE,
        "precision": "bf16 autocast over fp32 weights",
        "training_rope_theta": checkpoint.TRAINING_ROPE_THETA,
        "shipped_rope_theta": checkpoint.SHIPPED_ROPE_THETA,
        "num_threads": config.num_threads,
        "torch_version": torch.__version__,
        "num_steps": progress.step,
        "num_tokens": progress.num_tokens,
        "elapsed_s": round(progress.elapsed_s, 1),
        "tokens_per_s": round(progress.num_tokens / progress.elapsed_s, 1),
        "num_file_tokens": trainer.source.num_file_tokens,
        "validation": describe_validation(trainer, files),
    }


def shipped_model(trainer: Trainer) -> LlamaForCausalLM:
    """The trained model under the shipped ``config.json``: bf16, with its own ``rope_theta``."""
    model = LlamaForCausalLM(LlamaConfig.from_dict(checkpoint.architecture()))
    model.load_state_dict(
        {name: tensor.bfloat16() for name, tensor in trainer.model.state_dict().items()}
    )
    return model


def describe_validation(trainer: Trainer, files: Corpus) -> list[dict[str, object]]:
    """The losses of the shipped form over the held-out files, by sequence length."""
    model = shipped_model(trainer)
    stream = trainer.validation_stream
    num_bytes = sum(len(file.text.encode()) for file in files.validation)
    bytes_per_token = num_bytes / len(stream)
    schedule = trainer.config.schedule
    return [
        _describe_loss(length, validation_loss(model, stream, length), bytes_per_token)
        for length in (schedule.short_sequence_length, schedule.long_sequence_length)
    ]


def _describe_loss(length: int, nats_per_token: float, bytes_per_token: float) -> dict[str, object]:
    return {
        "sequence_length": length,
        "nats_per_token": round(nats_per_token, 4),
        "perplexity": round(math.exp(nats_per_token), 3),
        "bits_per_byte": round(nats_per_token / math.log(2) / bytes_per_token, 4),
        "bytes_per_token": round(bytes_per_token, 4),
    }
