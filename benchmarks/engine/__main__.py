"""`make bench-engine`: measures the engine's speed and the cost of its memory management, one table per part.

speed compares decode and prefill with other engines. The other parts are separate programs (`python -m
benchmarks.engine.PART --help`) and run here with their default options. The exit status is 1 if a bar is missed or a
part fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine import speed
from benchmarks.engine.contestants import CONTESTANTS
from benchmarks.engine.shapes import BATCHES, CONTEXTS, DTYPES, MODELS, SHAPES
from benchmarks.measure import table, write_json

OTHERS = (
    *("attention", "kv_error", "block_pool", "prefix", "lookahead", "overlap"),
    *("pipeline", "tensor_parallel"),
)
PARTS = ("speed", *OTHERS)
_VERDICTS = {None: "not measured", True: "met", False: "**missed**"}


def main() -> int:
    arguments = _arguments()
    good = True
    for part in arguments.only:
        print(f"## {part}\n", flush=True)
        good &= _speed(arguments) if part == "speed" else _other(part)
    return 0 if good else 1


def _speed(arguments: argparse.Namespace) -> bool:
    options = replace(
        speed.default_options(),
        models=arguments.models,
        dtypes=arguments.dtypes,
        contestants=arguments.contestants,
        cores=arguments.cores,
        rounds=arguments.rounds,
        retakes=arguments.retakes,
        shapes=[
            shape
            for shape in SHAPES
            if shape.prompt in (None, *arguments.contexts)
            and (shape.prompt or shape.batch in arguments.batches)
            and (shape.prompt or shape.context in arguments.contexts)
        ],
    )
    result = speed.run(options)
    write_json(arguments.json, result)
    print(_bars_table(result["bars"]) + "\n")
    return all(bar["met"] is not False for bar in result["bars"])


def _bars_table(bars: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            bar["claim"],
            *("–" if bar[key] is None else f"{bar[key]:.2f}" for key in ("measured", "of_processor")),
            f"≥ {bar['bar']:g}",
            _VERDICTS[bar["met"]],
        ]
        for bar in bars
    ]
    return table(("one core, bfloat16", "on the wall", "of the processor", "bar", ""), rows)


def _other(part: str) -> bool:
    module = f"benchmarks.engine.{part}"
    if importlib.util.find_spec(module) is None:
        raise SystemExit(f"{module} does not exist")
    return subprocess.run([sys.executable, "-m", module], check=False).returncode == 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--cores", type=int, nargs="+", default=(1, 2), help="each in turn")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a claim")
    parser.add_argument("--retakes", type=int, default=2, help="of a turn that others disturbed")
    parser.add_argument("--json", type=Path, default=Path("out/engine/speed.json"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
