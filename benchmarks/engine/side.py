"""One contestant with one model in a process of its own, which answers a line of JSON with a line of JSON.

So that its threads, its memory and its compiled code are its own, and all contestants are asked in turn.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    wish = json.loads(sys.argv[1])
    os.sched_setaffinity(0, wish["cores"])
    # Here, so that torch sees only these cores.
    from benchmarks.engine.contestants import make
    from benchmarks.engine.shapes import Shape

    contestant = make(wish["name"], Path(wish["folder"]), wish["dtype"], len(wish["cores"]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        shape = Shape(**asked["shape"])
        if asked["steps"] == 0:
            contestant.prepare(shape)
        times = contestant.run(shape, asked["steps"]) if asked["steps"] else []
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
