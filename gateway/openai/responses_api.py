"""Endpoints of `/v1/responses`, OpenAI's Responses API on top of chat completions, and the memory of stored responses.

A request is converted to the body of a chat completion, and its reply is made of that completion's reply. So sampling,
formats, tools and their streams exist once. Parameters that chat completions refuse are refused under this API's names.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moonserve.gateway.access.rate_limit_service import admission_of
from moonserve.gateway.errors import ApiError, reply_for
from moonserve.gateway.openai.chat_completions import ChatCompletions
from moonserve.gateway.openai.reply_format import ChatFormat
from moonserve.gateway.openai.request_schema import ChatBody, validated
from moonserve.gateway.openai.responses_api_events import ResponseEvents
from moonserve.gateway.openai.responses_api_schema import (
    RENAMED,
    ResponsesBody,
    input_messages,
    to_chat_body,
)
from moonserve.gateway.served_model import ServedModel
from moonserve.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A stored response, for retrieval and for later turns that continue it."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]  # the conversation so far, including this response's output

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        return len(json.dumps(self.response)) + len(json.dumps(self.messages))


class ResponseStore:
    """Stored responses, by tenant and id."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds all tenants together; 0 = nothing is stored."""
        self._max_bytes = max_bytes
        self._num_bytes: dict[str, int] = {}  # by tenant
        self._stored: dict[str, OrderedDict[str, tuple[StoredResponse, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes.values())

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a response and evicts old ones to make room. A response larger than the bound is not stored."""
        size = stored.num_bytes
        if size > self._max_bytes:
            return
        self.remove(tenant, response_id)
        self._stored.setdefault(tenant, OrderedDict())[response_id] = (stored, size)
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + size
        while self.num_bytes > self._max_bytes:
            fullest = max(self._num_bytes, key=lambda name: self._num_bytes[name])
            _, (_, freed) = self._stored[fullest].popitem(last=False)
            self._subtract(fullest, freed)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Returns the response, or None if it is not stored (any more) or belongs to another tenant."""
        kept = self._stored.get(tenant)
        if kept is None or response_id not in kept:
            return None
        kept.move_to_end(response_id)
        return kept[response_id][0]

    def remove(self, tenant: str, response_id: str) -> bool:
        """Removes a response. Returns False if it was not stored."""
        kept = self._stored.get(tenant)
        found = kept.pop(response_id, None) if kept is not None else None
        if found is None:
            return False
        self._subtract(tenant, found[1])
        return True

    def _subtract(self, tenant: str, size: int) -> None:
        self._num_bytes[tenant] -= size
        if not self._stored[tenant]:
            del self._stored[tenant], self._num_bytes[tenant]

    def validate(self) -> None:
        """Raises AssertionError if the bound or the size accounting is violated."""
        assert self.num_bytes <= self._max_bytes, "more is kept than may be"
        for tenant, kept in self._stored.items():
            assert kept, f"{tenant} has a place and nothing in it"
            assert self._num_bytes[tenant] == sum(size for _, size in kept.values())
        assert self._stored.keys() == self._num_bytes.keys()


class ResponsesApi:
    """Handlers of `/v1/responses`, on top of the chat completions of an `ChatCompletions`."""

    def __init__(self, api: ChatCompletions, model: ServedModel, store: ResponseStore) -> None:
        self._api = api
        self._model = model
        self._store = store

    async def create(self, request: Request) -> Response:
        """POST /v1/responses"""
        body = validated(ResponsesBody, await self._model.read(request))
        self._model.parser.warn_of_unknown(body.check())
        tenant = _tenant(request)
        previous = body.previous_response_id
        earlier = [] if previous is None else self._find(tenant, previous, 400).messages
        messages = [*earlier, *input_messages(body.input)]
        with _own_names():
            chat = self._model.parser.parse(ChatBody, json.dumps(to_chat_body(body, messages)).encode())

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                answered = [*messages, *input_messages(response["output"])]
                stored = StoredResponse(response=response, messages=answered)
                self._store.put(tenant, response["id"], stored)

        with _own_names():
            plan = await self._api.chat_plan(request, chat, "resp_")
            assert isinstance(plan.reply_format, ChatFormat)
            events = ResponseEvents(plan.reply_format, plan.header, body, keep)
            return await self._api.reply(request, replace(plan, reply_format=events))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{response_id}"""
        stored = self._find(_tenant(request), request.path_params["response_id"], 404)
        return JSONResponse(stored.response)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{response_id}"""
        response_id = request.path_params["response_id"]
        if not self._store.remove(_tenant(request), response_id):
            raise _unknown(response_id, 404)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _find(self, tenant: str, response_id: str, status: int) -> StoredResponse:
        stored = self._store.get(tenant, response_id)
        if stored is None:
            raise _unknown(response_id, status)
        return stored


def _tenant(request: Request) -> str:
    """Returns the tenant that owns the responses; "" if keys name none, and then all clients share them."""
    return admission_of(request).identity.tenant or ""


def _unknown(response_id: str, status: int) -> ApiError:
    return ApiError(
        status,
        f"response {response_id!r} is not stored; this gateway keeps only the latest ones, in its own memory: send the"
        " conversation as input instead",
        param="previous_response_id" if status == 400 else None,
        code="previous_response_not_found" if status == 400 else "not_found",
    )


@contextmanager
def _own_names() -> Iterator[None]:
    """Renames parameters in errors of the chat completion to the names of this API."""
    try:
        yield
    except (ApiError, InvalidRequest) as error:
        reply, message, own = reply_for(error), error.message, error.param
        if error.param is not None:
            own = RENAMED.get(error.param.partition("[")[0].partition(".")[0], error.param)
            message = message.replace(error.param, own)
        raise ApiError(
            reply.status, message, kind=reply.kind, param=own, code=reply.code, headers=reply.headers
        ) from error
