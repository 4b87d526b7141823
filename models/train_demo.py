"""Trains the demo model on the running interpreter's standard library.

    python -m models.train_demo --minutes 60 --compile

Owns the command line and the order of the work: corpus, tokenizer, training, record, export.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models import checkpoint, corpus, training_record
from models.train_tokenizer import save_tokenizer, train_tokenizer
from models.trainer import Trainer, TrainingConfig


def prepare(work_directory: Path) -> tuple[corpus.Corpus, Tokenizer]:
    """Read the corpus, train the tokenizer, and put the record of both in the work directory."""
    work_directory.mkdir(parents=True, exist_ok=True)
    files = corpus.load_corpus(corpus.standard_library_root())
    tokenizer = train_tokenizer(file.text for file in files.training)
    save_tokenizer(tokenizer, work_directory)
    checkpoint.write_json(work_directory / "corpus.json", corpus.describe(files))
    return files, tokenizer


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time budget")
    parser.add_argument("--work-directory", type=Path, default=Path("build/demo-training"))
    parser.add_argument("--output", type=Path, default=Path("models/demo"))
    parser.add_argument("--compile", action="store_true", help="torch.compile the training step")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint and end")
    return parser.parse_args()


def train(config: TrainingConfig, output: Path, *, resumes: bool) -> None:
    """Train, write the record of the run, and export the model."""
    torch.set_num_threads(config.num_threads)
    files, tokenizer = prepare(config.work_directory)
    trainer = Trainer(config, files, tokenizer)
    if resumes:
        trainer.resume()
    trainer.run()
    checkpoint.export_checkpoint(config.work_directory, output)
    training_record.write_record(trainer, files, output / "training")


def main() -> None:
    """Train and export, or only export."""
    arguments = parse_arguments()
    if arguments.export_only:
        checkpoint.export_checkpoint(arguments.work_directory, arguments.output)
        return
    config = TrainingConfig(
        work_directory=arguments.work_directory,
        minutes=arguments.minutes,
        compile=arguments.compile,
    )
    train(config, arguments.output, resumes=arguments.resume)


if __name__ == "__main__":
    main()
