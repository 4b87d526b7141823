"""`python -m tests.simulation --seeds N [--first S]` runs simulated worlds; `--seed S` prints the history of one."""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial

from tests.simulation.world import World

HASH_SEED = "0"
SEEDS_AT_ONCE = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--calm", action="store_true", help="nothing befalls them")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # equal seeds need an equal order of sets
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    logging.disable(logging.WARNING)
    return run(options) if options.seed is None else show(World(options.seed, is_calm=options.calm))


def run(options: argparse.Namespace) -> int:
    """Runs the worlds in as many processes as there are cores."""
    outcomes: Counter[str] = Counter()
    failed: list[int] = []
    num_seeds, began_at = 0, time.monotonic()
    gc.freeze()  # modules are never collected
    end = options.first + options.seeds
    parts = [range(at, min(at + SEEDS_AT_ONCE, end)) for at in range(options.first, end, SEEDS_AT_ONCE)]
    with multiprocessing.get_context("fork").Pool() as pool:
        for worlds in pool.imap(partial(simulate, is_calm=options.calm), parts):
            for seed, found, problems in worlds:
                num_seeds += 1
                outcomes += found
                if problems:
                    failed.append(seed)
                    print(f"seed {seed}: {problems[0]}", flush=True)
            if failed:
                break
    print(f"{num_seeds} seeds in {time.monotonic() - began_at:.1f} s, {dict(outcomes)}; failed: {failed}")
    return 1 if failed else 0


def simulate(seeds: range, is_calm: bool) -> list[tuple[int, Counter[str], list[str]]]:
    """Returns each seed with the outcomes and problems of its world."""
    gc.disable()  # a world is full of reference cycles, and those of several worlds are collected at once
    found = []
    for seed in seeds:
        world = World(seed, is_calm=is_calm)
        world.run()
        found.append((seed, world.outcomes(), world.problems))
    del world
    gc.collect()
    return found


def show(world: World) -> int:
    world.run()
    print("\n".join(world.history), vars(world.terms), world.outcomes(), world.digest(), *world.problems, sep="\n")
    return 1 if world.problems else 0


if __name__ == "__main__":
    sys.exit(main())
