"""Translation between requests of the cluster and vLLM's `/v1/completions`. Pure.

The server sees a part of an answer: the prefill server one token, the decode server those after it. Parameters that
look at the whole answer (`sampling.Way.WHOLE_ANSWER`) are refused by name, since over HTTP there is no own logits
processor that knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonserve.protocol.errors import InvalidRequest, NoWorker
from moonserve.protocol.request import FinishReason, Logprobs, PromptLogprobs, Request, Token, finish_reason
from moonserve.vllm.serving.sampling import WAYS, Way, engine_parameters, prompt_logprobs

REFUSED = tuple(name for name, way in WAYS.items() if way is Way.WHOLE_ANSWER)
_NOT_OF_HTTP = ("detokenize", "skip_clone")
_TOKEN = "token_id:"


def completion_body(
    request: Request, model: str, *, is_prefill: bool, salt: str, transfer: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the body that generates the request's next tokens, one for a prefill. Raises InvalidRequest for a
    parameter that cannot be kept."""
    refused = [name for name in REFUSED if getattr(request.sampling, name)]
    if refused:
        text = f"{', '.join(refused)}: not possible with attached vLLM servers, which see only a part of an answer"
        raise InvalidRequest(text, param=refused[0], request=request.request_id)
    given = engine_parameters(request, max_new_tokens=1 if is_prefill else None, exact=False)
    body = {name: value for name, value in given.items() if value is not None and name not in _NOT_OF_HTTP}
    # Otherwise those of the model's generation_config.json count.
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    body |= {"model": model, "prompt": list(request.token_ids), "request_id": request.request_id}
    body |= {"stream": not is_prefill, "return_token_ids": True, "return_tokens_as_token_ids": True}
    if salt:
        body["cache_salt"] = salt
    if transfer is not None:
        body["kv_transfer_params"] = dict(transfer)
    return body


def tokens_of(request: Request, choice: Mapping[str, Any], index: int, *, is_prefill: bool) -> tuple[Token, ...]:
    """Returns the tokens of a reply's or a stream's choice, numbered from `index`. Raises NoWorker if the server gave
    the request up."""
    ended = choice.get("finish_reason")
    if ended in ("abort", "error"):
        raise NoWorker(f"vLLM ended the request: {ended}", request=request.request_id)
    token_ids = choice.get("token_ids") or []
    logprobs = choice.get("logprobs")
    tokens = []
    for offset, token_id in enumerate(token_ids):
        reason = finish_reason(request.sampling, index + offset, token_id)
        if reason is None and offset == len(token_ids) - 1:
            reason = _unexpected_end(ended, is_prefill)
        tokens.append(
            Token(
                request_id=request.request_id,
                index=index + offset,
                token_id=token_id,
                logprobs=None if logprobs is None else _logprobs(logprobs, offset, request),
                finish_reason=reason,
            )
        )
    return tuple(tokens)


def _unexpected_end(ended: str | None, is_prefill: bool) -> FinishReason | None:
    if ended == "stop":
        return FinishReason.STOP  # a stop token of the server's own configuration
    return FinishReason.LENGTH if ended is not None and not is_prefill else None  # the model's context is full


def _logprobs(found: Mapping[str, Any], place: int, request: Request) -> Logprobs:
    top = (found.get("top_logprobs") or {place: {}})[place] or {}
    best = sorted(top.items(), key=lambda item: -item[1])[: request.sampling.num_logprobs or 0]
    return Logprobs(
        found["token_logprobs"][place], tuple((int(name.removeprefix(_TOKEN)), value) for name, value in best)
    )


def prompt_logprobs_of(request: Request, choice: Mapping[str, Any]) -> PromptLogprobs | None:
    """Returns the log-probabilities of the prompt's tokens, if the request wants them."""
    found = choice.get("prompt_logprobs")
    if not request.scores_prompt or not found:
        return None
    return prompt_logprobs(
        request, [{int(name): (e["logprob"], e["rank"]) for name, e in each.items()} for each in found[1:]]
    )


def num_cached_of(reply: Mapping[str, Any]) -> int:
    """Returns how many of the prompt's tokens were cached; told by servers with `--enable-prompt-tokens-details`."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
