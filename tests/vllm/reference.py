"""One vLLM instance without connector and server, whose tokens all others must give.

As a program (`python -m tests.vllm.reference TASK`) it is that instance, because vLLM changes global state of its
process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm import forks
from tests.vllm.servers import ENGINE, ENVIRONMENT, START_S, Answer

TOLERANCE = 1e-4
"""Largest difference of log probabilities that is rounding, in float32. One instance differs from itself by up to 3e-6
when other prompts are in the batch; one changed token of a prompt changes them by more than 1e-3."""
_RESULT = "RESULT "


@dataclass(frozen=True, slots=True)
class Expected:
    """Greedy tokens, and for each place the log probabilities of its two likeliest tokens."""

    tokens: list[int]
    logprobs: list[dict[int, float]]

    @property
    def answer(self) -> Answer:
        return Answer(self.tokens, [place[token] for token, place in zip(self.tokens, self.logprobs, strict=True)])

    def differs_from(self, answer: Answer) -> str:
        """Tells where an answer has a wrong token or log probability; empty if it has none. After a place where two
        tokens are equally likely, the answer may go another way."""
        if len(answer.tokens) != len(self.tokens):
            return f"{len(answer.tokens)} tokens instead of {len(self.tokens)}"
        for place, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            expected, likeliest = self.tokens[place], self.logprobs[place]
            if token != expected:
                is_tie = abs(likeliest[expected] - likeliest.get(token, -100.0)) < TOLERANCE
                return "" if is_tie else f"token {place} is {token} instead of {expected}"
            if abs(likeliest[token] - logprob) > TOLERANCE:
                return f"token {place} has log probability {logprob} instead of {likeliest[token]}"
        return ""


def assert_same(answers: Sequence[Answer], expected: Sequence[Expected], prompts: Sequence[Sequence[int]]) -> None:
    """Asserts that each answer has the expected tokens."""
    differences = [right.differs_from(answer) for right, answer in zip(expected, answers, strict=True)]
    wrong = [
        f"prompt of {len(prompt)} tokens: {difference}"
        for prompt, difference in zip(prompts, differences, strict=True)
        if difference
    ]
    assert not wrong, f"{len(wrong)} of {len(prompts)} answers are wrong:\n" + "\n".join(wrong[:20])


def assert_found(answers: Sequence[Answer], prompts: Sequence[Sequence[int]], block_size: int) -> None:
    """Asserts that nearly all full blocks of the prompts were found in a cache or store."""
    full = [(len(prompt) - 1) // block_size * block_size for prompt in prompts]
    found = [answer.num_cached for answer in answers]
    assert sum(found) >= 0.9 * sum(full), f"{sum(found)} of {sum(full)}: {list(zip(full, found, strict=True))}"


class Reference:
    """An instance that answers batches of prompts, in a process of its own. It starts at once; `answers` waits."""

    def __init__(
        self, model: Path, engine: dict[str, Any], batches: Sequence[Sequence[Sequence[int]]], max_tokens: int
    ) -> None:
        self._log = model.with_suffix(".reference.log")
        task = {"engine": {**ENGINE, **engine, "model": str(model)}, "batches": batches, "max_tokens": max_tokens}
        given = model.with_suffix(".reference.json")
        given.write_text(json.dumps(task))
        self._process = forks.start("tests.vllm.reference", [str(given)], ENVIRONMENT, self._log)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def answers(self) -> list[list[Expected]]:
        """Returns the answers of each batch."""
        self._process.join(START_S)
        text = self._log.read_text(errors="replace")
        results = [line.removeprefix(_RESULT) for line in text.splitlines() if line.startswith(_RESULT)]
        assert results, f"the reference gave no answer:\n{text[-6_000:]}"
        return [
            [
                Expected(each["tokens"], [{int(t): v for t, v in place.items()} for place in each["logprobs"]])
                for each in batch
            ]
            for batch in json.loads(results[0])
        ]


def main() -> None:
    """Answers the batches in the task, whose file is the argument."""
    from vllm import LLM, SamplingParams

    task = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**task["engine"], enable_prefix_caching=False)
    sampling = SamplingParams(
        temperature=0, max_tokens=task["max_tokens"], logprobs=2, ignore_eos=True, detokenize=False
    )
    results = [_answers(llm, prompts, sampling) for prompts in task["batches"]]
    print("\n" + _RESULT + json.dumps(results), flush=True)  # noqa: T201 - read by `Reference`
    os._exit(0)  # vLLM's own end takes seconds


def _answers(llm: Any, prompts: list[list[int]], sampling: Any) -> list[dict[str, Any]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(each.token_ids),
            "logprobs": [{token: entry.logprob for token, entry in place.items()} for place in each.logprobs],
        }
        for each in completions
    ]


if __name__ == "__main__":
    main()
