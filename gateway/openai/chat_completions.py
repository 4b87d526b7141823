"""OpenAI endpoints that generate: validate a body and return a reply that waits for the cluster.

Each endpoint has the same five steps: parse the body, find the model, make prompts, make choices, start the
generations. A request is charged to its key's limits before the cluster is involved. This module does not know sockets
or how a placement is made.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moonserve.gateway.access.rate_limit_service import admission_of
from moonserve.gateway.access.tenant_isolation import salt_of, tenant_of
from moonserve.gateway.config import GatewayConfig
from moonserve.gateway.errors import ApiError, invalid
from moonserve.gateway.generation.events import Choice, GenerationRequest, Piece
from moonserve.gateway.generation.output_queue import Answer
from moonserve.gateway.generation.service import Gateway
from moonserve.gateway.http import stream_resumption
from moonserve.gateway.http.stream_resumption import EventId, EventIds
from moonserve.gateway.http.streaming import ClusterReply, StreamReply, WholeReply, usage_of
from moonserve.gateway.openai.prompts import Prompt, chat_prompt, completion_prompts, truncated
from moonserve.gateway.openai.reply_format import ChatFormat, CompletionFormat, ReplyFormat, ReplyHeader, ReplyOptions
from moonserve.gateway.openai.request_schema import ChatBody, CompletionBody, SamplingBody
from moonserve.gateway.openai.sampling import choices_for, spellings
from moonserve.gateway.openai.structured_outputs import ConstraintChecker, OutputConstraint
from moonserve.gateway.openai.tool_call_grammar import ParsedChatFormat, ToolPlan, ToolPlanner
from moonserve.gateway.served_model import ServedModel
from moonserve.gateway.text.message_syntax import select
from moonserve.protocol.grammar import GrammarCache

_MAX_SESSION_ID = 256  # characters; the conductor hashes it
# Upper bound on the tokens of each choice that are charged in advance to a key's limits. Without `max_tokens` a client
# allows the whole context, which few answers fill and most keys may not use within a minute.
_EXPECTED_TOKENS = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """One request for the cluster, and the format of its reply."""

    body: SamplingBody
    prompts: Sequence[Prompt]
    choices: tuple[Choice, ...]
    reply_format: ReplyFormat
    header: ReplyHeader
    last: EventId | None  # last event that the client has, if this request resumes a stream


class ChatCompletions:
    """Handlers of the endpoints that generate."""

    def __init__(self, gateway: Gateway, model: ServedModel, config: GatewayConfig) -> None:
        tokenizer = model.tokenizer
        self._gateway = gateway
        self._model = model
        self._tokenizer = tokenizer
        self._config = config
        self._constraint_checker = ConstraintChecker(
            GrammarCache(
                Path(config.model),
                vocab_size=model.vocab_size,
                eos_token_ids=sorted(tokenizer.eos_token_ids),
            )
        )
        self._syntax = select(config.reasoning_parser, config.tool_call_parser, tokenizer)
        self._tools = ToolPlanner(
            self._syntax.calls,
            self._constraint_checker,
            allows_auto=config.enable_auto_tool_choice,
            tag_rule=self._syntax.tag_rule,
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        body = await self._model.body(ChatBody, request)
        return await self.reply(request, await self.chat_plan(request, body, "chatcmpl-"))

    async def chat_plan(self, request: Request, body: ChatBody, id_prefix: str) -> ReplyPlan:
        """Prepares a chat completion; another API may replace its reply format."""
        self._model.require(body.model)
        last = stream_resumption.last_event(request, body)
        body = stream_resumption.seeded(body, last)
        limits = self._model.limits()
        constraint = await self._constraint_checker.constraint_of(body)
        plan = await self._tools.plan(body, constraint)
        prompt = await chat_prompt(
            self._tokenizer,
            body.messages,
            limits,
            add_generation_prompt=body.adds_generation_prompt,
            variables=body.template_variables,
            continues=bool(body.continue_final_message),
            tools=body.tools,
        )
        prompt = truncated(prompt, body, limits)
        grammar = await self._grammar(plan, constraint, prompt)
        bad_words = spellings(self._tokenizer, body.bad_words, limits)
        choices = choices_for(body, [prompt], limits, "messages", grammar=grammar, bad_words=bad_words)
        if (plan is not None or self._syntax.keeps_special_tokens) and not body.skip_special_tokens:
            choices = tuple(replace(choice, skip_special_tokens=False) for choice in choices)
        header = self._header(id_prefix, request, body, last)
        options = _reply_options(body, logprobs=bool(body.logprobs))
        ids = [prompt.token_ids] * len(choices)
        reply_format = ChatFormat(header, options, self._tokenizer, ids)
        names, is_stream = plan.names if plan else None, bool(body.stream)
        parsers = [self._syntax.parser(prompt.text or "", names, is_eager=is_stream) for _ in choices]
        if found := [parser for parser in parsers if parser is not None]:
            shows = body.include_reasoning is not False
            reply_format = ParsedChatFormat(header, options, self._tokenizer, ids, found, shows_reasoning=shows)
        return ReplyPlan(
            body=body, prompts=[prompt], choices=choices, reply_format=reply_format, header=header, last=last
        )

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        body = await self._model.body(CompletionBody, request)
        self._model.require(body.model)
        last = stream_resumption.last_event(request, body)
        body = stream_resumption.seeded(body, last)
        limits = self._model.limits()
        prompts = await completion_prompts(self._tokenizer, body, limits)
        constraint = await self._constraint_checker.constraint_of(body)
        choices = choices_for(
            body,
            prompts,
            limits,
            "prompt",
            grammar=constraint.grammar if constraint else "",
            bad_words=spellings(self._tokenizer, body.bad_words, limits),
        )
        prompt_of_choice = [prompt for prompt in prompts for _ in range(body.num_choices)]
        echoes = [self._echo(body, prompt) for prompt in prompt_of_choice]
        header = self._header("cmpl-", request, body, last)
        options = _reply_options(body, logprobs=body.logprobs is not None)
        reply_format = CompletionFormat(
            header, options, self._tokenizer, [prompt.token_ids for prompt in prompt_of_choice], echoes
        )
        plan = ReplyPlan(
            body=body, prompts=prompts, choices=choices, reply_format=reply_format, header=header, last=last
        )
        return await self.reply(request, plan)

    # Steps

    async def _grammar(self, plan: ToolPlan | None, constraint: OutputConstraint | None, prompt: Prompt) -> str:
        """Returns the grammar of a chat's answers, in which reasoning may come first; empty = none."""
        inner, has_calls, param = plan.grammar if plan else "", True, "tools"
        if not inner and constraint is not None:
            inner, has_calls, param = constraint.grammar, False, constraint.param
        if not inner:
            return ""
        grammar = self._syntax.with_reasoning(inner, prompt.text or "", has_calls=has_calls)
        await self._constraint_checker.check(grammar, param)
        return grammar

    def _header(self, prefix: str, request: Request, body: SamplingBody, last: EventId | None) -> ReplyHeader:
        """Returns the reply's header. A resumed stream keeps its id and creation time."""
        return ReplyHeader(
            id=last.response_id if last else f"{prefix}{request.state.cluster_id}",
            created=last.created if last else int(time.time()),
            model=body.model or self._model.name,
        )

    def _echo(self, body: CompletionBody, prompt: Prompt) -> str:
        if not body.echo:
            return ""
        return self._tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text

    async def reply(self, request: Request, plan: ReplyPlan) -> ClusterReply:
        """Starts the request's generations and returns the reply, which waits for them."""
        body, last = plan.body, plan.last
        fingerprint = self._gateway.cluster.model_info().fingerprint
        choices = stream_resumption.with_known_tokens(plan.choices, last, fingerprint)
        generation_request = _generation_request(request, body, plan.header.model, choices)
        answer = await _admitted(request, self._gateway, generation_request, plan.prompts)
        slow_client_s = self._config.slow_client_s
        if not body.stream:
            return WholeReply(answer, slow_client_s, lambda pieces: _whole_body(plan, answer, pieces))
        event_ids = None
        if body.includes_event_ids or last is not None:
            event_ids = EventIds(plan.header, choices, fingerprint)
        return StreamReply(
            answer,
            slow_client_s,
            plan.reply_format,
            lambda: _trailing_chunks(plan, answer),
            event_ids,
            is_resumed=last is not None,
        )


def _whole_body(plan: ReplyPlan, answer: Answer, pieces: list[Piece]) -> dict[str, Any]:
    whole = plan.reply_format.whole_body(pieces, usage_of(answer, plan.prompts))
    return whole | ({"x_timing": answer.timing()} if plan.body.x_timing else {})


def _trailing_chunks(plan: ReplyPlan, answer: Answer) -> str:
    """Returns the chunks of a stream that follow all output."""
    timing = plan.reply_format.timing(answer.timing()) if plan.body.x_timing else ""
    is_wanted = plan.body.includes_usage
    return timing + (plan.reply_format.usage(usage_of(answer, plan.prompts)) if is_wanted else "")


def _reply_options(body: SamplingBody, *, logprobs: bool) -> ReplyOptions:
    return ReplyOptions(
        usage=body.includes_usage,
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
        echoed_logprobs=body.echoed_logprobs if isinstance(body, CompletionBody) else None,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


# From a validated body to the cluster


def _generation_request(
    request: Request, body: SamplingBody, model: str, choices: tuple[Choice, ...]
) -> GenerationRequest:
    """Makes the cluster's request of a body and the HTTP headers. Raises ApiError for invalid headers."""
    identity = admission_of(request).identity
    return GenerationRequest(
        request_id=request.state.cluster_id,
        client_id=request.state.request_id,
        arrived_at=request.state.arrived_at,
        model=model,
        session_id=_session_id(request) or body.prompt_cache_key or "",
        has_tools=isinstance(body, ChatBody) and bool(body.tools),
        cache_hints=body.cache_hints,
        choices=choices,
        priority=identity.priority_of(body.priority),
        tenant=tenant_of(identity, body.user),
        cache_salt=salt_of(identity.tenant, body.cache_salt),
        traceparent=request.headers.get("traceparent", ""),
        ttft_slo_s=_milliseconds(request, "x-slo-ttft-ms"),
        tbt_slo_s=_milliseconds(request, "x-slo-tbt-ms"),
    )


def _session_id(request: Request) -> str:
    given = request.headers.get("x-session-id", "")
    if len(given) > _MAX_SESSION_ID:
        raise invalid(f"x-session-id is longer than {_MAX_SESSION_ID} characters", "x-session-id")
    return given


def _milliseconds(request: Request, header: str) -> float:
    """Returns a header in milliseconds as seconds; 0 if it is absent."""
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


async def _admitted(
    request: Request, gateway: Gateway, generation_request: GenerationRequest, prompts: Sequence[Prompt]
) -> Answer:
    """Charges the key's limits and starts the generations. Raises ApiError if a limit is reached; see also
    `Gateway.generate`."""
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    expected = sum(min(c.sampling.max_tokens, _EXPECTED_TOKENS) for c in generation_request.choices)
    admission = admission_of(request)
    await admission.admit(prompt_tokens, expected)
    answer = gateway.generate(generation_request)
    admission.used = partial(_used, answer, prompt_tokens)
    return answer


def _used(answer: Answer, prompt_tokens: int) -> int:
    states = [generation.state for generation in answer.generations]
    if all(state.placement is None for state in states):
        return 0  # no instance has computed anything for it
    return prompt_tokens + sum(len(state.generated) for state in states)
