"""A report's folder: `index.html` to read, `results.json` to compute with. The only file here that writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import ConfigError
from traces.reports import canvas
from traces.reports.page import NO_PLOTS, page
from traces.reports.saved import results_to_json
from traces.simulator.results import SimulationResult

PAGE = "index.html"
RESULTS = "results.json"


def write_page(results: Sequence[SimulationResult], folder: Path | str) -> Path:
    """Returns the page's path. Raises ConfigError for no results and for what cannot be written.

    Without matplotlib the page has tables only, and stderr says what to install.
    """
    if not results:
        raise ConfigError("there are no results to report")
    folder = Path(folder)
    _write(folder / RESULTS, results_to_json(results))  # first: results are dearer than drawings
    if not canvas.is_available():
        print(f"{folder / PAGE}: {NO_PLOTS}", file=sys.stderr)
    _write(folder / PAGE, page(results))
    return folder / PAGE


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
