"""Log-probabilities of a prompt's tokens, each given all before it: arrays, since prompts are long. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLOAT = np.dtype("<f4")
UINT = np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptLogprobs:
    """Of n tokens that follow each other; of a whole prompt all but the first, which follows nothing."""

    logprobs: npt.NDArray[np.float32]  # [n], natural
    ranks: npt.NDArray[np.uint32]  # [n], 1 = no token was likelier
    top_ids: npt.NDArray[np.uint32]  # [n, k], the likeliest tokens there, best first
    top_logprobs: npt.NDArray[np.float32]  # [n, k], theirs

    def __len__(self) -> int:
        return len(self.logprobs)

    @classmethod
    def joined(cls, runs: list[PromptLogprobs], num_top: int) -> PromptLogprobs:
        """Runs that follow each other, of `num_top` likeliest tokens each; none of them is a run, too."""
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
