"""`make bench-engine`: measures the engine's speed and the cost of its memory management, one table per part.

speed compares decode and prefill with other engines. The other parts are separate programs (`python -m MODULE --help`,
see OTHERS) and run here with their default options. The exit status is 1 if a bar is missed or a part fails.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.roofline import decode_step_bytes, read_bytes_per_s
from benchmarks.engine.shapes import BATCHES, CONTEXTS, DEMO_FOLDER, DTYPES, MODELS, SHAPES, Shape, prompt_tokens
from benchmarks.engine.speed.contest import ContestantProcess, is_installed, measure_shape
from benchmarks.engine.speed.contestant import (
    CONTESTANTS,
    INT4,
    INT8,
    LLAMA_CPP,
    LLAMA_CPP_4,
    LLAMA_CPP_8,
    NATIVE,
    TRANSFORMERS,
    VLLM,
    ContestantConfig,
)
from benchmarks.harness.measure import table, write_json

# Formats the figures of `speed` as a table per run, and compares them with the bars.

Bar = dict[str, Any]
Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""contestant → shape's label → wall_s, processor_s, waited"""

_BARS = (
    # model, shape, compared with, least speed-up
    ("110M", "B1 C512", VLLM, 1.7),
    ("110M", "B8 C512", VLLM, 1.7),
    ("110M", "B1 C2048", VLLM, 1.7),
    ("110M", "B8 C2048", VLLM, 1.7),
    ("110M", "B1 C512", LLAMA_CPP, 1.0),
    ("110M", "B8 C512", LLAMA_CPP, 2.0),
    ("110M", "B1 C2048", LLAMA_CPP, 1.0),
    ("110M", "B8 C2048", LLAMA_CPP, 2.0),
    ("110M", "prefill 2048", VLLM, 1.3),
    ("demo", "B1 C512", TRANSFORMERS, 10.0),
    ("demo", "B1 C2048", TRANSFORMERS, 10.0),
)
_QUANTISED_BARS = tuple(
    # model, shape, contestant, compared with, least speed-up
    (model, *bar)
    for model in ("110M", "1B")
    for bar in (
        ("B1 C512", INT4, NATIVE, 2.2),
        ("B1 C512", INT8, NATIVE, 1.6),
        ("B8 C512", INT4, NATIVE, 1.3),
        ("B8 C512", INT8, NATIVE, 1.2),
        *(
            (label, own, peer, least)
            for own, peer in ((INT4, LLAMA_CPP_4), (INT8, LLAMA_CPP_8))
            for label, least in (("B1 C512", 1.2), ("B8 C512", 2.5), ("prefill 512", 1.0))
        ),
    )
)


def speed_table(run: Mapping[str, Any], contestants: Sequence[str]) -> str:
    """Returns a table of ms per decode step and prompt tokens/s, by wall clock and (in brackets) processor time."""
    figures: Figures = run["figures"]
    measured = {label for own in figures.values() for label in own}
    shapes = [shape for shape in SHAPES if shape.label in measured]
    rows = [[_title(name, run), *_cells(figures.get(name), shapes)] for name in contestants]
    floors = [run["floor"].get(shape.label) for shape in shapes]
    floor = ["–" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in floors]
    rows.append([f"floor at {run['bytes_per_s'] / 1e9:.0f} GB/s", *floor])
    cores = "one core" if run["cores"] == 1 else f"{run['cores']} cores"
    title = f"{run['model']}, {run['dtype']}, {cores}: ms per step, tokens/s; wall (processor)"
    return table([title, *(shape.label for shape in shapes)], rows)


def _title(name: str, run: Mapping[str, Any]) -> str:
    return f"{name} (other tokens!)" if name in run["differing"] else name


def _cells(own: Mapping[str, Mapping[str, float]] | None, shapes: Sequence[Shape]) -> list[str]:
    if own is None:
        return ["not installed", *("–" for _ in shapes[1:])]
    return [_cell(own[shape.label], shape) for shape in shapes]


def _cell(seconds: Mapping[str, float], shape: Shape) -> str:
    wall, processor = seconds["wall_s"], seconds["processor_s"]
    if shape.prompt is not None:
        return f"{shape.prompt / wall:,.0f} ({shape.prompt / processor:,.0f})"
    return f"{wall * 1e3:.2f} ({processor * 1e3:.2f})"


def bars(runs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Compares speed-ups by wall clock on one core with bfloat16 with the bars; None where not measured."""
    found: dict[str, Figures] = {
        run["model"]: run["figures"] for run in runs if run["cores"] == 1 and run["dtype"] == "bfloat16"
    }
    claims = [(model, label, NATIVE, peer, least) for model, label, peer, least in _BARS]
    return [_bar(found.get(claim[0], {}), *claim) for claim in (*claims, *_QUANTISED_BARS)]


def _bar(figures: Figures, model: str, label: str, own: str, peer: str, least: float) -> Bar:
    wall, processor = (_times_faster(figures, label, own, peer, clock) for clock in ("wall_s", "processor_s"))
    return {
        "claim": f"{model} {label}{'' if own == NATIVE else f', {own}'}, times {peer}",
        "measured": wall,
        "of_processor": processor,
        "bar": least,
        "met": None if wall is None else wall >= least,
    }


def _times_faster(figures: Figures, label: str, own: str, peer: str, clock: str) -> float | None:
    mine, others = (figures.get(name, {}).get(label) for name in (own, peer))
    return None if mine is None or others is None else others[clock] / mine[clock]


# Compares decode and prefill of this engine with other engines and with the limit of memory bandwidth.
#
# All contestants with one model and dtype run at the same time and take turns at one shape after another. Figures are
# medians over the rounds; ratios compare figures of the same run. In float32, contestants with other tokens than the
# first are marked. The limit ("floor") applies to memory: data in a cache may be faster.

_GREEDY_PROMPT, _GREEDY_TOKENS = 64, 16
_LEAST_VOCABULARY = 4096
"""Smallest vocabulary of the models, so that the prompt is valid for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    models: Sequence[str]
    dtypes: Sequence[str]
    contestants: Sequence[str]
    shapes: Sequence[Shape]
    cores: Sequence[int]  # numbers of cores, measured one after the other
    rounds: int
    retakes: int  # of a turn that other programs disturbed
    scratch: Path  # models in the contestants' formats, kept for the next run


def run(options: Options) -> dict[str, Any]:
    """Returns seconds per number of cores, model, dtype, contestant and label of the shape, and the bars."""
    runs = []
    options.scratch.mkdir(parents=True, exist_ok=True)
    installed = [name for name in options.contestants if is_installed(name)]
    for count in options.cores:
        cores = sorted(os.sched_getaffinity(0))[:count]
        with _confined(cores):
            bandwidth = read_bytes_per_s(cores)
            for model in options.models:
                folder = model_folder(model, options.scratch)
                for dtype in options.dtypes:
                    floor = {
                        shape.label: decode_step_bytes(folder, dtype, shape) / bandwidth
                        for shape in options.shapes
                        if shape.prompt is None
                    }
                    one = {"cores": count, "model": model, "dtype": dtype, "floor": floor}
                    configs = [
                        ContestantConfig(
                            name=name,
                            folder=str(folder),
                            scratch=str(options.scratch),
                            dtype=dtype,
                            cores=cores,
                        )
                        for name in installed
                    ]
                    runs.append({**one, "bytes_per_s": bandwidth, **_measure(options, configs)})
                    print(speed_table(runs[-1], options.contestants) + "\n", flush=True)
    return {"rounds": options.rounds, "runs": runs, "bars": bars(runs)}


def model_folder(name: str, scratch: Path) -> Path:
    """Returns the folder of a model; writes one with random weights if it is missing."""
    if name == "demo":
        return DEMO_FOLDER
    folder = scratch.absolute() / name
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "benchmarks.engine.random_model", str(folder), name]
        subprocess.run(command, check=True)
    return folder


@contextmanager
def _confined(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(options: Options, configs: Sequence[ContestantConfig]) -> dict[str, Any]:
    """Returns figures (contestant → label → wall_s, processor_s, waited) and differing (names with other tokens)."""
    with ExitStack() as stack:
        sides: dict[str, ContestantProcess] = {}
        for config in configs:
            sides[config.name] = ContestantProcess(config)
            stack.callback(sides[config.name].close)
        for side in sides.values():
            side.wait_until_ready()
        differing = _differing(sides) if configs and configs[0].dtype == "float32" else []
        figures: dict[str, dict[str, Any]] = {name: {} for name in sides}
        for shape in options.shapes:
            found = measure_shape(sides, shape, options.rounds, options.retakes)
            for name, seconds in found.items():
                figures[name][shape.label] = seconds
    return {"figures": figures, "differing": differing}


def _differing(sides: Mapping[str, ContestantProcess]) -> list[str]:
    prompt = prompt_tokens(0, _GREEDY_PROMPT, _LEAST_VOCABULARY)
    tokens = {name: side.greedy(prompt, _GREEDY_TOKENS) for name, side in sides.items()}
    first = next(iter(tokens.values()))
    return [name for name, own in tokens.items() if own != first]


OTHERS = {
    **{
        part: f"benchmarks.engine.{part}" for part in ("attention", "quantisation", "block_pool", "prefix", "lookahead")
    },
    **{part: f"benchmarks.worker.{part}" for part in ("overlap", "pipeline")},
    "tensor_parallel": "benchmarks.engine.tensor_parallel",
}
"""Modules of the other parts."""
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
    options = Options(
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
        scratch=Path("out/engine/models"),
    )
    result = run(options)
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
    return subprocess.run([sys.executable, "-m", OTHERS[part]], check=False).returncode == 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[:2])
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
