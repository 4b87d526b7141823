"""What transformers makes of a checkpoint, as the truth that a cluster's answers are held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

LOGPROB_TOLERANCE = 1e-4
# Two float32 implementations cannot agree on the greater of two logits that are closer than this.
TIE = 1e-4


@dataclass(frozen=True)
class Continuation:
    """A greedy continuation and the log-probabilities it was chosen from: [tokens, vocab]."""

    token_ids: list[int]
    logprobs: torch.Tensor

    def is_tie(self, index: int, token_id: int) -> bool:
        """Whether `token_id` could as well have been the greedy choice at `index`."""
        row = self.logprobs[index]
        return float(row.max() - row[token_id]) < TIE


def load_reference(path: Path) -> PreTrainedModel:
    """The model of a checkpoint in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, and the other core left to the cluster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def continuations(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Continuation]:
    """Greedy continuations, each generated alone."""
    with one_thread(), torch.inference_mode():
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


def num_ties(answer: dict[str, Any], expected: Continuation) -> int:
    """Fails unless the answer's tokens and log-probabilities are the reference's. After a choice between two logits
    that are equal within `TIE` the continuations have different histories, so the comparison ends there; 1 if so."""
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
