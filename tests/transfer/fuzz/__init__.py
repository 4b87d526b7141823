"""What arrives is not what was agreed: mutated sessions against a live engine.

`MOONSERVE_FUZZ_S` is the time for all of it together, 10 s unless told. `MOONSERVE_FUZZ_SEED` begins
elsewhere; a failure names the seed of the one input that caused it.
"""

from __future__ import annotations

import os

TOTAL_S = float(os.environ.get("MOONSERVE_FUZZ_S", "10"))
FIRST_SEED = int(os.environ.get("MOONSERVE_FUZZ_SEED", "0"))
