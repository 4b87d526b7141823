"""Prompts as tokens, made from validated bodies within the model's limits.

A prompt that the model or its context cannot read is refused here with 400, so that workers can trust their input.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonserve.gateway.errors import ApiError, invalid
from moonserve.gateway.openai.request_schema import (
    MAX_CHOICES,
    ChatBody,
    ChatMessage,
    CompletionBody,
    SamplingBody,
    Tool,
)
from moonserve.gateway.text.tokenizer import Tokenizer

# Shorter texts are encoded in less time than a thread takes to start.
_INLINE_CHARS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the served model."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_prompt_tokens: int | None = None  # the operator's limit; None = the model's


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as tokens, and its text if the client sent text."""

    token_ids: tuple[int, ...]
    text: str | None


async def encode(
    tokenizer: Tokenizer, text: str, limits: Limits, param: str, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Returns the tokens of a text; a long one is encoded in a thread. A text that cannot fit is refused first."""
    if len(text) > limits.max_model_len * tokenizer.longest_token:
        at_least = -(-len(text) // tokenizer.longest_token)
        raise _too_long(f"at least {at_least}", limits, param)
    if len(text) <= _INLINE_CHARS:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens))


async def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    limits: Limits,
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, object] | None,
    tools: Sequence[Tool] | None = None,
    add_special_tokens: bool = False,
    continues: bool = False,
) -> Prompt:
    """Renders a conversation as one prompt. The template writes special tokens itself. `continues`: the prompt ends
    where the last message's text ends."""
    text = tokenizer.template.render(
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
        variables=variables,
        tools=[tool.for_template() for tool in tools or ()] or None,
    )
    if continues:
        text = cut_after_message(text, messages[-1])
    ids = await encode(tokenizer, text, limits, "messages", add_special_tokens=add_special_tokens)
    return Prompt(token_ids=ids, text=text)


def cut_after_message(text: str, message: ChatMessage) -> str:
    """Returns a rendered conversation up to the end of its last message's text, which the answer continues. If the
    template stripped the text, the prompt ends where the stripped text does (like transformers). Raises ApiError."""
    content = message.for_template()["content"] or ""
    stripped = content.strip()
    if not stripped or stripped not in text:
        raise invalid(
            "continue_final_message: the chat template changes the text of the last message, or it has none",
            "continue_final_message",
        )
    start = text.rindex(stripped)
    whole = content.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else stripped)]


def truncated(prompt: Prompt, body: SamplingBody, limits: Limits) -> Prompt:
    """Returns the last `truncate_prompt_tokens` tokens of a prompt; −1 leaves room for the requested answer."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return prompt
    if wanted == 0:
        raise invalid(
            "truncate_prompt_tokens: must be at least 1, or -1 for the model's whole context",
            "truncate_prompt_tokens",
        )
    if wanted < 0:
        wanted = max(1, limits.max_model_len - max(1, _answer_tokens(body)))
    if len(prompt.token_ids) <= wanted:
        return prompt
    return Prompt(token_ids=prompt.token_ids[-wanted:], text=None)


def _answer_tokens(body: SamplingBody) -> int:
    """Returns the number of tokens that the client requested; 0 if it gave none."""
    chat = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return chat or body.max_tokens or 0


async def completion_prompts(tokenizer: Tokenizer, body: CompletionBody, limits: Limits) -> list[Prompt]:
    """Returns the prompts of a completions request, in order."""
    prompts = split_prompt(body.prompt)
    check_count(body, len(prompts), "prompt")
    made = [
        Prompt(
            token_ids=await encode(tokenizer, one, limits, "prompt", add_special_tokens=True),
            text=one,
        )
        if isinstance(one, str)
        else Prompt(token_ids=tuple(one), text=None)
        for one in prompts
    ]
    return [truncated(prompt, body, limits) for prompt in made]


def split_prompt(prompt: object) -> list[str] | list[list[int]]:
    """Splits a string, strings, token ids or lists of token ids into a list of prompts. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _all(prompt, str):
            return prompt
        if _all(prompt, int):
            return [prompt]
        if _all(prompt, list) and all(one and _all(one, int) for one in prompt):
            return prompt
    raise invalid(
        "prompt: must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        "prompt",
    )


def _all(values: list[object], kind: type) -> bool:
    return all(type(value) is kind for value in values)  # not isinstance: True is not a token id


def check_count(body: SamplingBody, num_prompts: int, param: str) -> None:
    """Raises ApiError for more choices than one request may have."""
    count = body.num_choices
    if count * num_prompts > MAX_CHOICES:
        raise invalid(
            f"{num_prompts} prompts with n={count} exceed the limit of {MAX_CHOICES} choices",
            "n" if count > 1 else param,
        )


def check_prompt(token_ids: Sequence[int], limits: Limits, param: str) -> None:
    """Raises ApiError for a prompt that the model cannot read or continue."""
    if not token_ids:
        raise invalid(f"{param}: the prompt is empty", param)
    if len(token_ids) >= limits.max_model_len:
        raise _too_long(str(len(token_ids)), limits, param)
    max_tokens = limits.max_prompt_tokens
    if max_tokens is not None and len(token_ids) > max_tokens:
        raise ApiError(
            400,
            f"the prompt has {len(token_ids)} tokens; this server accepts at most {max_tokens}",
            param=param,
            code="context_length_exceeded",
        )
    check_vocabulary((max(token_ids), min(token_ids)), limits.vocab_size, param)


def check_vocabulary(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raises ApiError for ids that are not in the model's vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(f"{param}: token id {token_id} is not in the vocabulary of {vocab_size}", param)


def _too_long(num_tokens: str, limits: Limits, param: str) -> ApiError:
    return ApiError(
        400,
        f"the prompt has {num_tokens} tokens; this model's context is {limits.max_model_len}"
        " tokens, including at least one for the output",
        param=param,
        code="context_length_exceeded",
    )
