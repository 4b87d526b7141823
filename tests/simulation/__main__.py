"""`python -m tests.simulation --seeds N [--first S]` runs simulated worlds; `--seed S` prints the history of one."""

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter

HASH_SEED = "0"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--calm", action="store_true", help="nothing befalls them")
    parser.add_argument("--keep-going", action="store_true")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # equal seeds need an equal order of sets
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    logging.disable(logging.WARNING)
    first = options.first if options.seed is None else options.seed
    return run(first, 1 if options.seed is not None else options.seeds, options)


def run(first: int, count: int, options: argparse.Namespace) -> int:
    from tests.simulation.world import World

    outcomes: Counter[str] = Counter()
    failed: list[int] = []
    began_at = time.monotonic()
    gc.disable()  # a world is full of reference cycles and is collected as a whole
    gc.freeze()  # modules are never collected
    for seed in range(first, first + count):
        if seed % 10 == 0:
            gc.collect()
        world = World(seed, is_calm=options.calm)
        world.run()
        outcomes += world.outcomes()
        if options.seed is not None:
            print("\n".join(world.history), vars(world.terms), world.outcomes(), world.digest(), sep="\n")
        if world.problems:
            failed.append(seed)
            print(f"seed {seed}: {world.problems[0]}", flush=True)
            if not options.keep_going:
                break
    took_s = time.monotonic() - began_at
    print(f"{seed - first + 1} seeds in {took_s:.1f} s, {dict(outcomes)}; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
