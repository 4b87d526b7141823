"""Endpoints that concern the model and need no worker: what is served, text to tokens and back."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.errors import ApiError
from gateway.served import ServedModel
from gateway.wishes.params import Limits, chat_prompt, encode
from gateway.wishes.schema import BodyParser, DetokenizeBody, TokenizeBody


class ModelEndpoints:
    """Handlers over one served model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._parser = BodyParser()

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        raise ApiError(
            400,
            "this model predicts tokens and was not trained to make embeddings; ask a server that serves one that was",
            param="model",
            code="unsupported_parameter",
        )

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse(
            {
                "object": "list",
                "data": [self._model.card(name) for name in self._model.served.names],
            }
        )

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        name = request.path_params["name"]
        self._model.require(name)
        return JSONResponse(self._model.card(name))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        body = self._parser.parse(TokenizeBody, await self._model.read(request))
        self._model.require(body.model)
        limits = self._model.limits()
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
        body = self._parser.parse(DetokenizeBody, await self._model.read(request))
        self._model.require(body.model)
        unknown = [t for t in body.tokens if t >= self._model.served.vocab_size]
        if unknown:
            raise ApiError(
                400,
                f"tokens: id {unknown[0]} is not in the vocabulary of {self._model.served.vocab_size}",
                param="tokens",
                code="invalid_value",
            )
        return JSONResponse({"prompt": self._tokenizer.decode(body.tokens)})

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
                template=self._model.template(body.chat_template),
            )
            return prompt.token_ids
        return await encode(
            self._tokenizer,
            body.prompt or "",
            limits,
            "prompt",
            add_special_tokens=body.add_special_tokens is not False,
        )
