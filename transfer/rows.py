"""Runs of bytes between one local and one remote segment, as arrays from `submit` to the system call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
"""Shape (n, 3), C-contiguous: remote offset, local offset, length of contiguous runs of bytes."""

REMOTE, LOCAL, LENGTH = 0, 1, 2
