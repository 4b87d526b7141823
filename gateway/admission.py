"""A wish past its key's limits: charged with what it is expected to take before it is asked for, and settled by what it
took.

The prompt is known; of the answer, what the client allows, but at most `EXPECTED_TOKENS` of each choice: without
`max_tokens` a client allows the whole context, which few answers fill and most keys may not use within a minute.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from gateway.limits.visit import Visit
from gateway.service import Answer, Gateway
from gateway.wishes.params import Prompt
from gateway.wishes.wish import Wish

EXPECTED_TOKENS = 1_024


def visit_of(request: Request) -> Visit:
    """The visit that the front door opened."""
    visit: Visit = request.state.visit
    return visit


async def admitted(
    request: Request, gateway: Gateway, wish: Wish, prompts: Sequence[Prompt]
) -> Answer:
    """Asks for the wish. Raises ApiError where a limit of its key is reached, and what `Gateway.ask` raises."""
    answers: list[Answer] = []
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)

    def used() -> int:
        states = [generation.state for answer in answers for generation in answer.generations]
        if all(state.placement is None for state in states):
            return 0  # nobody has computed anything for it
        return prompt_tokens + sum(len(state.generated) for state in states)

    expected = sum(min(c.sampling.max_tokens, EXPECTED_TOKENS) for c in wish.choices)
    await visit_of(request).admit(prompt_tokens, expected, used)
    answers.append(gateway.ask(wish))
    return answers[0]
