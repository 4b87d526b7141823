"""The endpoints of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admission import visit_of
from gateway.api import Api
from gateway.errors import ApiError
from gateway.replies.chunks import Heading
from gateway.responses.events import ResponseEvents
from gateway.responses.output import ResponseForm, whole
from gateway.responses.schema import ResponsesBody
from gateway.responses.store import ResponseStore, StoredResponse
from gateway.responses.translate import RENAMED, chat_of, input_messages, output_messages
from gateway.served import ServedModel
from gateway.wishes.schema import BodyParser, ChatBody, validated
from protocol.errors import InvalidRequest


class Responses:
    """Over the chat completions of an `Api`."""

    def __init__(self, api: Api, model: ServedModel, store: ResponseStore) -> None:
        self._api = api
        self._model = model
        self._store = store
        self._parser = BodyParser()

    async def create(self, request: Request) -> Response:
        """POST /v1/responses"""
        body = validated(ResponsesBody, await self._model.read(request))
        self._parser.warn_of_unknown(body.check())
        tenant = _tenant(request)
        messages = [*self._earlier(tenant, body), *input_messages(body.input)]
        with _own_names():
            chat = self._parser.parse(ChatBody, json.dumps(chat_of(body, messages)).encode())

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                answered = [*messages, *output_messages(response["output"])]
                stored = StoredResponse(response=response, messages=answered)
                self._store.put(tenant, response["id"], stored)

        def render(heading: Heading, completion: bytes) -> bytes:
            response = whole(ResponseForm(heading, body), json.loads(completion))
            keep(response)
            return json.dumps(response, separators=(",", ":")).encode()

        with _own_names():
            return await self._api.answer_chat(
                request,
                chat,
                "resp_",
                lambda heading, chunks: ResponseEvents(chunks, ResponseForm(heading, body), keep),
                render,
            )

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

    def _earlier(self, tenant: str, body: ResponsesBody) -> list[dict[str, Any]]:
        if body.previous_response_id is None:
            return []
        return self._find(tenant, body.previous_response_id, 400).messages

    def _find(self, tenant: str, response_id: str, status: int) -> StoredResponse:
        stored = self._store.get(tenant, response_id)
        if stored is None:
            raise _unknown(response_id, status)
        return stored


def _tenant(request: Request) -> str:
    """Whose responses they are; where keys do not say, everybody's."""
    return visit_of(request).identity.tenant or ""


def _unknown(response_id: str, status: int) -> ApiError:
    return ApiError(
        status,
        f"no response {response_id!r} is remembered: this gateway keeps the latest ones in its own memory; send the"
        " conversation as input instead",
        param="previous_response_id" if status == 400 else None,
        code="previous_response_not_found" if status == 400 else "not_found",
    )


@contextmanager
def _own_names() -> Iterator[None]:
    """Refusals of the chat completion name the parameters of this API."""
    try:
        yield
    except ApiError as error:
        raise ApiError(
            error.status,
            _renamed(error.message, error.param),
            kind=error.kind,
            param=_own_name(error.param),
            code=error.code,
            headers=error.headers,
        ) from error
    except InvalidRequest as error:
        raise ApiError(
            400,
            _renamed(error.message, error.param),
            param=_own_name(error.param),
            code="invalid_value",
        ) from error


def _own_name(param: str | None) -> str | None:
    if param is None:
        return None
    theirs = param.partition("[")[0].partition(".")[0]
    return RENAMED.get(theirs, param)


def _renamed(message: str, param: str | None) -> str:
    own = _own_name(param)
    return message if param is None or own is None else message.replace(param, own)
