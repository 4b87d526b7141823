"""The loss curve of a run: a CSV that grows while training, and its plot."""

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """One line of the curve. ``validation_loss`` is empty where it was not measured."""

    step: int
    elapsed_s: float
    num_tokens: int
    tokens_per_s: float
    learning_rate: float
    sequence_length: int
    train_loss: float  # nats per token, mean since the row before
    validation_loss: float | None


def append_row(path: Path, row: LossRow) -> None:
    """Append ``row`` to the CSV at ``path``, with a header if the file is new."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(LossRow)])
        if is_new:
            writer.writeheader()
        writer.writerow({name: _format(value) for name, value in asdict(row).items()})


def _format(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def drop_rows_after(path: Path, step: int) -> None:
    """Remove the rows past ``step``: those that a resumed run will write again."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *(row for row in rows if int(row[0]) <= step)])


def plot(csv_path: Path, png_path: Path) -> None:
    """Draw both losses (nats per token) over the training time (minutes)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with csv_path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, style in (("train_loss", "-"), ("validation_loss", "o-")):
        points = [(float(row["elapsed_s"]) / 60, float(row[name])) for row in rows if row[name]]
        axes.plot(*zip(*points, strict=True), style, markersize=3, label=name.replace("_", " "))
    axes.set_xlabel("training time [min]")
    axes.set_ylabel("loss [nats per token]")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(png_path, dpi=120)
