"""The OpenAI endpoints that generate: a checked body in, a reply that waits for the cluster out.

Each endpoint is the same five steps: parse, find the model, make prompts, make choices, ask. Knows neither sockets nor
how a placement comes about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.admission import admitted
from gateway.asking import wish_of
from gateway.choices import best, choices_for
from gateway.config import GatewayConfig
from gateway.replies import resuming
from gateway.replies.chunks import ChatChunks, Chunks, CompletionChunks, Heading, Wants
from gateway.replies.feed import Piece
from gateway.replies.resuming import EventId, EventIds
from gateway.replies.usage import usage_of, with_timing
from gateway.replies.waiting import ClusterReply, StreamReply, WholeReply
from gateway.replies.whole import render_chat, render_completion
from gateway.served import ServedModel
from gateway.service import Answer, Gateway
from gateway.tools.formats import format_of
from gateway.tools.plan import ToolPlanner
from gateway.tools.replies import chat_chunks, message_of
from gateway.wishes.bad_words import spellings
from gateway.wishes.forms import FormChecker
from gateway.wishes.params import (
    Prompt,
    chat_prompt,
    completion_prompts,
    truncated,
)
from gateway.wishes.schema import (
    BodyParser,
    ChatBody,
    CompletionBody,
    SamplingBody,
)
from gateway.wishes.wish import Choice
from protocol.grammar import Grammars


class Api:
    """Handlers of the endpoints that generate."""

    def __init__(self, gateway: Gateway, model: ServedModel, config: GatewayConfig) -> None:
        tokenizer = model.tokenizer
        self._gateway = gateway
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._parser = BodyParser()
        self._forms = FormChecker(
            Grammars(
                Path(config.model),
                vocab_size=model.served.vocab_size,
                eos_token_ids=sorted(tokenizer.eos_token_ids),
            )
        )
        self._tools = ToolPlanner(
            format_of(config.tool_call_parser, tokenizer.template_source),
            self._forms,
            allows_auto=config.enable_auto_tool_choice,
            is_special=tokenizer.is_special,
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body = self._parser.parse(ChatBody, await self._model.read(request))
        return await self.answer_chat(
            request, body, "chatcmpl-", lambda heading, chunks: chunks, lambda heading, whole: whole
        )

    async def answer_chat(
        self,
        request: Request,
        body: ChatBody,
        id_prefix: str,
        as_stream: Callable[[Heading, Chunks], Chunks],
        as_whole: Callable[[Heading, bytes], bytes],
    ) -> Response:
        """A chat completion in another API's form: `as_stream` and `as_whole` turn chunks and body into that."""
        self._model.require(body.model)
        last = resuming.last_event(request, body)
        body = resuming.seeded(body, last)
        limits = self._model.limits()
        form = await self._forms.form_of(body)
        plan = await self._tools.plan(body, form)
        prompt = await chat_prompt(
            self._tokenizer,
            body.messages,
            limits,
            add_generation_prompt=body.adds_generation_prompt,
            variables=body.chat_template_kwargs,
            continues=bool(body.continue_final_message),
            tools=body.tools,
            template=self._model.template(body.chat_template),
        )
        prompt = truncated(prompt, body, limits)
        grammar = (plan.grammar if plan else "") or (form.grammar if form else "")
        bad_words = spellings(self._tokenizer, body.bad_words, limits)
        choices = choices_for(
            body, [prompt], limits, "messages", grammar=grammar, bad_words=bad_words
        )
        if plan is not None:
            choices = plan.seen_in(choices, body)
        heading = self._heading(id_prefix, request, body, last)
        wants = _wants(body, logprobs=bool(body.logprobs))
        chunks = chat_chunks(
            heading,
            wants,
            self._tokenizer,
            num_choices=len(choices),
            prompt_token_ids=prompt.token_ids,
            plan=plan,
        )
        return await self._reply(
            request,
            body,
            [prompt],
            choices,
            as_stream(heading, chunks),
            heading,
            last,
            lambda pieces, usage: as_whole(
                heading,
                render_chat(
                    heading,
                    wants,
                    self._tokenizer,
                    prompt.token_ids,
                    pieces,
                    usage,
                    None if plan is None else partial(message_of, plan),
                ),
            ),
        )

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body = self._parser.parse(CompletionBody, await self._model.read(request))
        self._model.require(body.model)
        body.check_best_of()
        last = resuming.last_event(request, body)
        body = resuming.seeded(body, last)
        limits = self._model.limits()
        prompts = await completion_prompts(self._tokenizer, body, limits)
        form = await self._forms.form_of(body)
        choices = choices_for(
            body,
            prompts,
            limits,
            "prompt",
            grammar=form.grammar if form else "",
            bad_words=spellings(self._tokenizer, body.bad_words, limits),
        )
        told = [prompt for prompt in prompts for _ in range(body.num_choices)]
        echoes = [self._echo(body, prompt) for prompt in told]
        heading = self._heading("cmpl-", request, body, last)
        wants = _wants(body, logprobs=body.logprobs is not None)
        prompt_ids = [prompt.token_ids for prompt in told]
        chunks = CompletionChunks(
            heading, wants, self._tokenizer, prompt_token_ids=prompt_ids, echoes=echoes
        )
        return await self._reply(
            request,
            body,
            prompts,
            choices,
            chunks,
            heading,
            last,
            lambda pieces, usage: render_completion(
                heading,
                wants,
                self._tokenizer,
                prompt_ids,
                echoes,
                best(pieces, num_drawn=body.num_drawn, num_kept=body.num_choices),
                usage,
            ),
        )

    # Steps

    def _heading(
        self, prefix: str, request: Request, body: SamplingBody, last: EventId | None
    ) -> Heading:
        """A stream that goes on keeps its name."""
        return Heading(
            id=last.response_id if last else f"{prefix}{request.state.cluster_id}",
            created=last.created if last else int(time.time()),
            model=body.model or self._model.name,
        )

    def _echo(self, body: CompletionBody, prompt: Prompt) -> str:
        if not body.echo:
            return ""
        return self._tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    async def _reply(
        self,
        request: Request,
        body: SamplingBody,
        prompts: Sequence[Prompt],
        choices: tuple[Choice, ...],
        chunks: Chunks,
        heading: Heading,
        last: EventId | None,
        render: Callable[[list[list[Piece]], dict[str, Any]], bytes],
    ) -> ClusterReply:
        fingerprint = self._gateway.cluster.facts().fingerprint
        choices = resuming.without_known(choices, last, fingerprint)
        wish = wish_of(request, body, choices)
        answer = await admitted(request, self._gateway, wish, prompts)
        slow_client_s = self._config.slow_client_s

        def usage() -> dict[str, Any]:
            return usage_of(answer, prompts)

        if body.stream:
            timing = event_ids = None
            if body.x_timing and isinstance(chunks, ChatChunks | CompletionChunks):
                timing = partial(_timing_chunk, chunks, answer)
            if body.includes_event_ids or last is not None:
                event_ids = EventIds(heading, choices, fingerprint)
            return StreamReply(
                answer,
                slow_client_s,
                chunks,
                usage if body.includes_usage else None,
                timing,
                event_ids,
                is_resumed=last is not None,
            )
        return WholeReply(
            answer,
            slow_client_s,
            lambda pieces: with_timing(body, render(pieces, usage()), answer),
        )


def _timing_chunk(chunks: ChatChunks | CompletionChunks, answer: Answer) -> str:
    return chunks.timing(answer.timing())


def _wants(body: SamplingBody, *, logprobs: bool) -> Wants:
    return Wants(
        usage=body.includes_usage,
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
        echoed_logprobs=body.echoed_logprobs if isinstance(body, CompletionBody) else None,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )
