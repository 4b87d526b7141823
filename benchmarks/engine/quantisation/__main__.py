"""Measures errors and speed of quantised KV and weights: `python -m benchmarks.engine.quantisation`.

*Error*: the demo model in float32 reads files of this repository, on which it was not trained: the first half of each
text as a prompt, the rest token by token as in decode. Its logits are compared with the logits over a float32 cache,
for each dtype, block size and granularity of scales; also with quantised weights. Then each variant continues the
prompts greedily. *Products*: native kernels, which multiply quantised weights as integers, beside float32 products of
the same weights. *Speed*: native kernels in bfloat16 on one core, in turns; medians of processor time.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import random_model
from benchmarks.engine.quantisation.errors import (
    error_table,
    errors,
    many_texts,
    product_errors,
    product_table,
    read_texts,
)
from benchmarks.engine.quantisation.speed import speed_table, speeds
from benchmarks.engine.shapes import DEMO_FOLDER
from benchmarks.harness.measure import write_json
from moonserve.engine.engine import set_threads

PARTS = ("error", "products", "speed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.quantisation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--models", nargs="*", default=("demo", "110M"), help="of speed")
    parser.add_argument("--json", type=Path, default=Path("out/engine_quantisation.json"))
    arguments = parser.parse_args()
    set_threads(1)
    figures: dict[str, Any] = {}
    if "error" in arguments.only:
        with torch.inference_mode():
            figures["errors"] = errors(read_texts())
        print(error_table(figures["errors"]) + "\n")
    if "products" in arguments.only:
        with torch.inference_mode():
            figures["products"] = product_errors(many_texts())
        print(product_table(figures["products"]) + "\n")
    if "speed" in arguments.only:
        with tempfile.TemporaryDirectory() as own:
            if "110M" in arguments.models:
                random_model.write(Path(own))
            folders = {"demo": DEMO_FOLDER, "110M": Path(own)}
            figures["speeds"] = [
                row for model in arguments.models for row in speeds(model, folders[model], arguments.rounds)
            ]
        print(speed_table(figures["speeds"]))
    write_json(arguments.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
