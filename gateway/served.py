"""The served model as clients know it: its names, its limits, and the bodies that ask for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from gateway.body import read_body
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.service import Gateway
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from gateway.wishes.params import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What does not change while the process runs."""

    names: tuple[str, ...]
    vocab_size: int
    created: int  # Unix seconds


class ServedModel:
    """What every endpoint that concerns the model begins with."""

    def __init__(
        self, gateway: Gateway, tokenizer: Tokenizer, served: Served, config: GatewayConfig
    ) -> None:
        self.tokenizer = tokenizer
        self.served = served
        self._gateway = gateway
        self._config = config

    @property
    def name(self) -> str:
        """That replies give where the client named none."""
        return self.served.names[0]

    async def read(self, request: Request) -> bytes:
        """The body, within the limits of size and time."""
        config = self._config
        body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
        request.state.arrived_at = time.monotonic()  # what a slow upload takes is the client's
        return body

    def require(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not served; None is any."""
        names = self.served.names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {', '.join(names)}",
                param="model",
                code="model_not_found",
            )

    def template(self, source: str | None) -> ChatTemplate | None:
        """That a request brings; None = it has none. Raises ApiError where the operator does not allow that, and
        InvalidRequest for what is no template."""
        if source is None:
            return None
        if not self._config.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template: a template is a program, and this server runs none of its clients'; its operator can"
                " allow it with --trust-request-chat-template",
                param="chat_template",
                code="unsupported_parameter",
            )
        return self.tokenizer.request_templates.get(source)

    def limits(self) -> Limits:
        """As the workers have them now."""
        return Limits(
            max_model_len=self._gateway.cluster.facts().max_model_len,
            vocab_size=self.served.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            max_prompt_tokens=self._config.max_prompt_tokens,
        )

    def card(self, name: str) -> dict[str, Any]:
        """An entry of /v1/models."""
        view = self._gateway.cluster.view
        return {
            "id": name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "moonserve",
            "root": self.name,
            "parent": None,
            "max_model_len": view.max_model_len if view and view.max_model_len else None,
            "vocab_size": self.served.vocab_size,
            "block_size": view.layout.block_size if view and view.fingerprint else None,
        }
