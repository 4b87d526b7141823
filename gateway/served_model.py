"""The served model for clients, and endpoints that need no worker: models, tokenization and detokenization."""

import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moonserve.gateway.config import GatewayConfig
from moonserve.gateway.errors import ApiError
from moonserve.gateway.generation.service import Gateway
from moonserve.gateway.http.connection import read_body
from moonserve.gateway.openai.prompts import Limits, chat_prompt, check_vocabulary, encode
from moonserve.gateway.openai.request_schema import B, Body, BodyParser, ChatMessage, TokenId, Tools
from moonserve.gateway.text.tokenizer import Tokenizer, load_vocab_size


class TokenizeBody(Body):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # default: True for prompts, False for messages
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class ServedModel:
    """First steps of every endpoint that concerns the model, and handlers of endpoints that need no worker."""

    def __init__(self, gateway: Gateway, tokenizer: Tokenizer, config: GatewayConfig) -> None:
        self.tokenizer = tokenizer
        self.names = config.names
        self.vocab_size = load_vocab_size(Path(config.model)) or tokenizer.size
        self._created = int(time.time())
        self._gateway = gateway
        self._config = config
        self.parser = BodyParser()

    @property
    def name(self) -> str:
        """Name used in replies if the client names none."""
        return self.names[0]

    async def read(self, request: Request) -> bytes:
        """Reads the body within the limits of size and time."""
        config = self._config
        body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        request.state.arrived_at = time.monotonic()  # time of a slow upload is not the gateway's
        return body

    async def body(self, cls: type[B], request: Request) -> B:
        """Reads and validates the body. Raises ApiError."""
        return self.parser.parse(cls, await self.read(request))

    def require(self, name: str | None) -> None:
        """Raises ApiError (404) if the model is not served; None stands for any model."""
        names = self.names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"this server does not have the model {name!r}; it has {', '.join(names)}",
                param="model",
                code="model_not_found",
            )

    def limits(self) -> Limits:
        """Returns the model's limits as the workers report them now."""
        return Limits(
            max_model_len=self._gateway.cluster.model_info().max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            max_prompt_tokens=self._config.max_prompt_tokens,
        )

    def card(self, name: str) -> dict[str, Any]:
        """Returns an entry of /v1/models."""
        view = self._gateway.cluster.view
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "moonserve",
            "root": self.name,
            "parent": None,
            "max_model_len": view.max_model_len if view and view.max_model_len else None,
            "vocab_size": self.vocab_size,
            "block_size": view.layout.block_size if view and view.fingerprint else None,
        }

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings"""
        why = "this model makes no embeddings; use a server with an embedding model"
        raise ApiError(400, why, param="model")

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse(
            {
                "object": "list",
                "data": [self.card(name) for name in self.names],
            }
        )

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        name = request.path_params["name"]
        self.require(name)
        return JSONResponse(self.card(name))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        body = await self.body(TokenizeBody, request)
        self.require(body.model)
        limits = self.limits()
        ids = await self._tokens_of(body, limits)
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": limits.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            reply["token_strs"] = [self.tokenizer.token_name(token_id) for token_id in ids]
        return JSONResponse(reply)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        body = await self.body(DetokenizeBody, request)
        self.require(body.model)
        check_vocabulary(body.tokens, self.vocab_size, "tokens")
        return JSONResponse({"prompt": self.tokenizer.decode(body.tokens)})

    async def _tokens_of(self, body: TokenizeBody, limits: Limits) -> tuple[int, ...]:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
        if body.messages is not None:
            prompt = await chat_prompt(
                self.tokenizer,
                body.messages,
                limits,
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
                tools=body.tools,
                add_special_tokens=body.add_special_tokens is True,
            )
            return prompt.token_ids
        return await encode(
            self.tokenizer,
            body.prompt or "",
            limits,
            "prompt",
            add_special_tokens=body.add_special_tokens is not False,
        )
