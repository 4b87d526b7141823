"""The cluster as its gateway shows it, for commands of the terminal."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from deploy.explain import KEY_ENV
from protocol.errors import MoonserveError, Unauthenticated

_TIMEOUT_S = 10.0


def cluster_view(url: str, api_key: str) -> dict[str, Any]:
    """`GET /v1/cluster`. Blocks. Raises MoonserveError when it does not answer, Unauthenticated for a wrong key."""
    return fetch(url, "/v1/cluster", api_key)


def figures(url: str, api_key: str) -> dict[str, Any]:
    """`GET /v1/figures`, likewise."""
    return fetch(url, "/v1/figures", api_key)


def fetch(url: str, path: str, api_key: str) -> dict[str, Any]:
    """A JSON object of the gateway. Blocks. Raises MoonserveError when it does not answer, Unauthenticated for a wrong
    key."""
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers_for(api_key))
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            view: dict[str, Any] = json.load(response)
            return view
    except urllib.error.HTTPError as error:
        with error:
            raise refused(url, error) from error
    except (OSError, ValueError) as error:  # ValueError: no URL, or no JSON
        raise no_answer(url, error) from error


def headers_for(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def refused(url: str, error: urllib.error.HTTPError) -> MoonserveError:
    """In the gateway's own words, where it has some. Reads the reply."""
    if error.code == 401:
        return Unauthenticated(f"wrong API key; set {KEY_ENV}")
    try:
        return MoonserveError(str(json.load(error)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return no_answer(url, error)


def no_answer(url: str, error: Exception) -> MoonserveError:
    return MoonserveError(f"no answer from {url}: {error}; give the gateway's address with --url")
