"""The cluster as its gateway shows it, for commands of the terminal."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from deploy.terminal.endings import KEY_ENV, NotFound
from protocol.errors import MoonserveError, Unauthenticated

DEFAULT_URL = "http://127.0.0.1:8000"
URL_ENV = "MOONSERVE_URL"
_TIMEOUT_S = 10.0
# HTTPException: another protocol, or an answer that breaks off; ValueError: no URL, or no JSON.
NO_ANSWER = (OSError, HTTPException, ValueError)


def add_url(parser: ArgumentParser, environ: Mapping[str, str]) -> None:
    """The argument that says where the gateway is."""
    parser.add_argument("--url", default=environ.get(URL_ENV, DEFAULT_URL), help="of the gateway")


def cluster_view(url: str, api_key: str) -> dict[str, Any]:
    """`GET /v1/cluster`. Blocks. Raises MoonserveError when it does not answer, Unauthenticated for a wrong key."""
    return fetch(url, "/v1/cluster", api_key)


def figures(url: str, api_key: str) -> dict[str, Any]:
    """`GET /v1/figures`, likewise."""
    return fetch(url, "/v1/figures", api_key)


def fetch(url: str, path: str, api_key: str, *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """A JSON object of the gateway. Blocks. Raises MoonserveError when it does not answer, Unauthenticated for a wrong
    key, NotFound."""
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers_for(api_key))
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            view: dict[str, Any] = json.load(response)
            return view
    except urllib.error.HTTPError as error:
        with error:
            raise refused(url, error) from error
    except NO_ANSWER as error:
        raise no_answer(url, error) from error


def headers_for(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def refused(url: str, error: urllib.error.HTTPError) -> MoonserveError:
    """In the gateway's own words, where it has some. Reads the reply."""
    if error.code == 401:
        return Unauthenticated(f"wrong API key; set {KEY_ENV}")
    try:
        message = str(json.load(error)["error"]["message"])
    except (*NO_ANSWER, KeyError, TypeError):
        return no_answer(url, error)
    return NotFound(message) if error.code == 404 else MoonserveError(message)


def no_answer(url: str, error: Exception) -> MoonserveError:
    # What speaks another protocol is quoted, and would move the cursor.
    why = repr(error) if isinstance(error, HTTPException) else error
    return MoonserveError(f"no answer from {url}: {why}; give the gateway's address with --url")
