"""`python -m tests.chaos --minutes N --seed S`: runs, prints the report, and exits with 1 where it is not good."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import NUM_WISHES, Terms, run
from tests.chaos.truth import SYNTHETIC, wishes
from tests.public_trace import TRACE

DEMO = Path(__file__).parents[2] / "models" / "demo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trace", type=Path, help="the public conversation trace where it is there"
    )
    parser.add_argument("--json", type=Path, help="where the report goes, too")
    parser.add_argument(
        "--folder", type=Path, help="for logs and the disk; a temporary one when not given"
    )
    options = parser.parse_args()
    trace = options.trace or (TRACE if TRACE.exists() else SYNTHETIC)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "disk").mkdir(parents=True, exist_ok=True)
    terms = Terms(model=None, seed=options.seed, minutes=options.minutes, trace=trace)
    report = run(terms, wishes(DEMO, trace, NUM_WISHES), folder)
    print(report.as_markdown())
    if options.json is not None:
        options.json.write_text(report.as_json() + "\n")
    if not report.is_good:  # whatever else is wrong, this is what to read first
        print(*report.tally.complaints, f"logs: {folder / 'logs'}", sep="\n", file=sys.stderr)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
