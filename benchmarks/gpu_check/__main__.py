"""Runs every check that the time allows and prints one table: `benchmarks/gpu_check.sh`.

Exit codes: 0 all executed checks passed, 1 a check failed, 2 wrong arguments or a missing package, 3 no GPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

NO_GPU = 3
_BUDGET_S = 470.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton
    try:
        import torch
    except ImportError:
        print("torch is not installed: make serve installs everything, or pip install torch")
        return 2
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device here, so nothing was verified")
        return NO_GPU
    return _run(options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check.json"), help="JSON file")
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S, help="seconds for everything")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="checks whose name contains one of these"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run the checks tiny on the CPU, in Triton's interpreter: tests the checks, no GPU",
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    import torch

    from benchmarks.gpu_check.checks import run_checks
    from benchmarks.gpu_check.context import FULL, REHEARSAL, CheckContext, measure_ceilings
    from benchmarks.gpu_check.report import Row, as_document, as_table, describe_machine
    from benchmarks.harness.measure import write_json

    began = time.monotonic()
    scale = REHEARSAL if options.rehearse else FULL
    device = torch.device("cpu") if options.rehearse else torch.device("cuda", 0)
    machine = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **describe_machine(device)}
    ceilings = measure_ceilings(device, scale)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes of the checks
    bench = CheckContext(device=device, scale=scale, ceilings=ceilings)
    rows: list[Row] = []
    for row in run_checks(bench, options.only, began + options.budget_s):
        print(f"{row.status:8} {row.name}  {row.found}  {row.reason}", file=sys.stderr, flush=True)
        rows.append(row)
    print(as_table(machine, ceilings, rows))
    write_json(options.out, as_document(machine, ceilings, rows, time.monotonic() - began))
    return 1 if any(row.status == "fail" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
