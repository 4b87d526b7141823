"""The OpenAI endpoints: a checked body in, a reply that waits for the cluster out.

Each endpoint is the same five steps: parse, find the model, make prompts, make choices, ask. Knows HTTP's headers but
neither sockets nor how a placement comes about.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admission import admitted, visit_of
from gateway.body import read_body
from gateway.chunks import ChatChunks, Chunks, CompletionChunks, Heading, Wants
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.feed import Piece
from gateway.forms import FormChecker
from gateway.isolation import salt_of
from gateway.limits.visit import Identity
from gateway.params import (
    Limits,
    Prompt,
    chat_prompt,
    choices_for,
    completion_prompts,
    encode,
    truncated,
)
from gateway.replies import ClusterReply, StreamReply, WholeReply
from gateway.schema import (
    BodyParser,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
)
from gateway.service import Answer, Gateway
from gateway.tokenizer import Tokenizer
from gateway.tools.formats import format_of
from gateway.tools.plan import ToolPlanner
from gateway.tools.replies import chat_chunks, message_of
from gateway.whole import render_chat, render_completion
from gateway.wish import Choice, Wish
from protocol.grammar import Grammars

_MAX_TENANT = 256  # characters; the conductor keeps it with each decision, so longer names are known by a digest
_TENANT_DIGEST_BYTES = 16
_MAX_SESSION_ID = 256  # characters; the conductor hashes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model as clients know it."""

    names: tuple[str, ...]
    vocab_size: int
    created: int  # Unix seconds


class Api:
    """Handlers of the endpoints that concern the model."""

    def __init__(
        self, gateway: Gateway, tokenizer: Tokenizer, served: Served, config: GatewayConfig
    ) -> None:
        self._gateway = gateway
        self._tokenizer = tokenizer
        self._served = served
        self._config = config
        self._parser = BodyParser()
        self._forms = FormChecker(
            Grammars(
                Path(config.model),
                vocab_size=served.vocab_size,
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
        body = self._parser.parse(ChatBody, await self.read(request))
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
        self._find_model(body.model)
        limits = self._limits()
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
        )
        prompt = truncated(prompt, body, limits)
        grammar = (plan.grammar if plan else "") or (form.grammar if form else "")
        choices = choices_for(body, [prompt], limits, "messages", grammar)
        if plan is not None:
            choices = plan.seen_in(choices, body)
        heading = self._heading(id_prefix, request, body)
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
        body = self._parser.parse(CompletionBody, await self.read(request))
        self._find_model(body.model)
        if body.best_of not in (None, body.n or 1):
            raise ApiError(400, "best_of other than n is not supported", param="best_of")
        limits = self._limits()
        prompts = await completion_prompts(self._tokenizer, body, limits)
        form = await self._forms.form_of(body)
        choices = choices_for(body, prompts, limits, "prompt", form.grammar if form else "")
        echoes = [self._echo(body, prompts[i // (body.n or 1)]) for i in range(len(choices))]
        heading = self._heading("cmpl-", request, body)
        wants = _wants(body, logprobs=body.logprobs is not None)
        prompt_ids = [choice.token_ids for choice in choices]
        chunks = CompletionChunks(
            heading, wants, self._tokenizer, prompt_token_ids=prompt_ids, echoes=echoes
        )
        return await self._reply(
            request,
            body,
            prompts,
            choices,
            chunks,
            lambda pieces, usage: render_completion(
                heading, wants, self._tokenizer, prompt_ids, echoes, pieces, usage
            ),
        )

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        raise ApiError(400, "this model does not make embeddings", param="model")

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse(
            {"object": "list", "data": [self._model_card(name) for name in self._served.names]}
        )

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        name = request.path_params["name"]
        self._find_model(name)
        return JSONResponse(self._model_card(name))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        body = self._parser.parse(TokenizeBody, await self.read(request))
        self._find_model(body.model)
        limits = self._limits()
        ids = await self._tokens_of(body, limits)
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            reply["token_strs"] = [self._tokenizer.token_name(token_id) for token_id in ids]
        return JSONResponse(reply)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        body = self._parser.parse(DetokenizeBody, await self.read(request))
        self._find_model(body.model)
        unknown = [t for t in body.tokens if t >= self._served.vocab_size]
        if unknown:
            raise ApiError(
                400,
                f"tokens: id {unknown[0]} is not in the vocabulary of {self._served.vocab_size}",
                param="tokens",
                code="invalid_value",
            )
        return JSONResponse({"prompt": self._tokenizer.decode(body.tokens)})

    # Steps

    async def read(self, request: Request) -> bytes:
        """The body, within the limits of size and time."""
        return await read_body(request, self._config.max_body_bytes, self._config.body_timeout_s)

    def _find_model(self, name: str | None) -> None:
        if name is not None and name not in self._served.names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {', '.join(self._served.names)}",
                param="model",
                code="model_not_found",
            )

    def _limits(self) -> Limits:
        return Limits(
            max_model_len=self._gateway.cluster.facts().max_model_len,
            vocab_size=self._served.vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            max_prompt_tokens=self._config.max_prompt_tokens,
        )

    async def _tokens_of(self, body: TokenizeBody, limits: Limits) -> tuple[int, ...]:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            prompt = await chat_prompt(
                self._tokenizer,
                body.messages,
                limits,
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
                tools=body.tools,
                add_special_tokens=body.add_special_tokens is True,
            )
            return prompt.token_ids
        return await encode(
            self._tokenizer,
            body.prompt or "",
            limits,
            "prompt",
            add_special_tokens=body.add_special_tokens is not False,
        )

    def _heading(self, prefix: str, request: Request, body: SamplingBody) -> Heading:
        return Heading(
            id=f"{prefix}{request.state.cluster_id}",
            created=int(time.time()),
            model=body.model or self._served.names[0],
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
        render: Callable[[list[list[Piece]], dict[str, Any]], bytes],
    ) -> ClusterReply:
        wish = _wish(request, body, choices)
        answer = await admitted(request, self._gateway, wish, prompts)
        slow_client_s = self._config.slow_client_s

        def usage() -> dict[str, Any]:
            return usage_of(answer, prompts)

        if body.stream:
            timing = None
            if body.x_timing and isinstance(chunks, ChatChunks | CompletionChunks):
                timing = partial(_timing_chunk, chunks, answer)
            return StreamReply(
                answer, slow_client_s, chunks, usage if body.includes_usage else None, timing
            )
        return WholeReply(
            answer,
            slow_client_s,
            lambda pieces: with_timing(body, render(pieces, usage()), answer),
        )

    def _model_card(self, name: str) -> dict[str, Any]:
        view = self._gateway.cluster.view
        return {
            "id": name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "moonserve",
            "root": self._served.names[0],
            "parent": None,
            "max_model_len": view.max_model_len if view and view.max_model_len else None,
            "vocab_size": self._served.vocab_size,
            "block_size": view.layout.block_size if view and view.fingerprint else None,
        }


def _timing_chunk(chunks: ChatChunks | CompletionChunks, answer: Answer) -> str:
    return chunks.timing(answer.timing())


def with_timing(body: SamplingBody, reply: bytes, answer: Answer) -> bytes:
    """A reply's JSON object with `x_timing`, where the client wants that."""
    if not body.x_timing:
        return reply
    return reply[:-1] + b',"x_timing":' + json.dumps(answer.timing()).encode() + b"}"


def usage_of(answer: Answer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A prompt counts once, however many choices continue it."""
    states = [generation.state for generation in answer.generations]
    per_prompt = len(states) // len(prompts)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    completion_tokens = sum(len(state.generated) for state in states)
    cached = sum(state.cached_tokens for state in states[::per_prompt])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _wants(body: SamplingBody, *, logprobs: bool) -> Wants:
    return Wants(
        usage=body.includes_usage, token_ids=bool(body.return_token_ids), logprobs=logprobs
    )


def _wish(request: Request, body: SamplingBody, choices: tuple[Choice, ...]) -> Wish:
    identity = visit_of(request).identity
    return Wish(
        request_id=request.state.cluster_id,
        client_id=request.state.request_id,
        session_id=_session_id(request),
        choices=choices,
        priority=identity.priority_of(body.priority),
        tenant=_tenant(identity, body),
        cache_salt=salt_of(identity.tenant, body.cache_salt),
        traceparent=request.headers.get("traceparent", ""),
        ttft_slo_s=_milliseconds(request, "x-slo-ttft-ms"),
        tbt_slo_s=_milliseconds(request, "x-slo-tbt-ms"),
    )


def _tenant(identity: Identity, body: SamplingBody) -> str:
    """Whose key it is; where keys do not say, whom the client names."""
    if identity.tenant is not None:
        return identity.tenant
    named = body.user or ""
    if len(named) <= _MAX_TENANT:
        return named
    return hashlib.blake2b(named.encode(), digest_size=_TENANT_DIGEST_BYTES).hexdigest()


def _session_id(request: Request) -> str:
    given = request.headers.get("x-session-id", "")
    if len(given) > _MAX_SESSION_ID:
        raise ApiError(
            400,
            f"x-session-id is longer than {_MAX_SESSION_ID} characters",
            param="x-session-id",
            code="invalid_value",
        )
    return given


def _milliseconds(request: Request, header: str) -> float:
    """A header in milliseconds as seconds; 0 when it is absent."""
    given = request.headers.get(header)
    if given is None:
        return 0.0
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not (0.0 < value < 1e9):
        raise ApiError(400, f"{header} must be a positive number", param=header)
    return value / 1000.0
