"""Log-probabilities of a prompt's tokens, each given all before it. Pure data, in arrays, since prompts are long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLOAT = np.dtype("<f4")
UINT = np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of n consecutive tokens. A whole prompt has them for all tokens but the first."""

    logprobs: npt.NDArray[np.float32]  # [n], natural logarithms
    ranks: npt.NDArray[np.uint32]  # [n], 1 = no token was likelier
    top_ids: npt.NDArray[np.uint32]  # [n, k], the likeliest tokens at each position, best first
    top_logprobs: npt.NDArray[np.float32]  # [n, k], log-probabilities of top_ids

    def __len__(self) -> int:
        return len(self.logprobs)

    @classmethod
    def joined(cls, runs: list[PromptLogprobs], num_top: int) -> PromptLogprobs:
        """Concatenates consecutive runs with `num_top` likeliest tokens each. No runs give an empty one."""
        if not runs:
            return cls(
                logprobs=np.empty(0, FLOAT),
                ranks=np.empty(0, UINT),
                top_ids=np.empty((0, num_top), UINT),
                top_logprobs=np.empty((0, num_top), FLOAT),
            )
        return cls(
            logprobs=np.concatenate([run.logprobs for run in runs]),
            ranks=np.concatenate([run.ranks for run in runs]),
            top_ids=np.concatenate([run.top_ids for run in runs]),
            top_logprobs=np.concatenate([run.top_logprobs for run in runs]),
        )
