"""Reference output of transformers, or of a single engine, with which tests compare a cluster's answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.engine.kernels.calls import kernels_folder, threads
from tests.engine.steps import load_engine, tokens_of

LOGPROB_TOLERANCE = 1e-4
# Two float32 implementations cannot agree on the greater of two logits that are closer than this.
TIE = 1e-4


@dataclass(frozen=True)
class Continuation:
    """Greedy continuation and the log-probabilities from which it was chosen: [tokens, vocab]."""

    token_ids: list[int]
    logprobs: torch.Tensor

    def is_tie(self, index: int, token_id: int) -> bool:
        """True if `token_id` is an equally good greedy choice at `index`, within `TIE`."""
        row = self.logprobs[index]
        return float(row.max() - row[token_id]) < TIE


def load_reference(path: Path) -> PreTrainedModel:
    """Loads the model of a checkpoint in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def continuations(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Continuation]:
    """Returns greedy continuations, each generated alone."""
    # With one thread, sums have one order, and the other cores are left to the cluster.
    with threads(1), torch.inference_mode():
        return [_continuation(model, prompt, num_tokens) for prompt in prompts]


def _continuation(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> Continuation:
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.log_softmax(torch.cat(output.logits).float(), dim=-1)
    return Continuation(output.sequences[0, len(prompt) :].tolist(), logprobs)


def one_engines(
    model: Path, prompts: Sequence[list[int]], num_tokens: int, block_size: int, **options: str
) -> list[list[int]]:
    """Returns the continuation of each prompt by native kernels in one process."""
    own = {"num_blocks": 8192 // block_size, "cache_folder": kernels_folder(), **options}
    return tokens_of(load_engine(model, block_size, **own), prompts, num_tokens)


def num_ties(answer: dict[str, Any], expected: Continuation) -> int:
    """Fails unless the answer's tokens and log-probabilities are the reference's. If the two choose differently between
    logits that are equal within `TIE`, the histories differ from there on: the comparison ends and 1 is returned."""
    choice = answer["choices"][0]
    found, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert len(found) == len(logprobs) == len(expected.token_ids)
    for index, (token_id, logprob) in enumerate(zip(found, logprobs, strict=True)):
        true_logprob = float(expected.logprobs[index, token_id])
        assert logprob == pytest.approx(true_logprob, abs=LOGPROB_TOLERANCE), index
        if token_id != expected.token_ids[index]:
            assert expected.is_tie(index, token_id), (index, found, expected.token_ids)
            return 1
    return 0
