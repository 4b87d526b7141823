"""The cluster as its gateway shows it (`GET /v1/cluster`), for commands that look for a worker."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from deploy.explain import KEY_ENV
from protocol.errors import MoonserveError, Unauthenticated

_TIMEOUT_S = 10.0


def cluster_view(url: str, api_key: str) -> dict[str, Any]:
    """Blocks. Raises MoonserveError when it does not answer, Unauthenticated for a wrong key."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/cluster", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            view: dict[str, Any] = json.load(response)
            return view
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 401:
                raise Unauthenticated(f"wrong API key; set {KEY_ENV}") from error
            raise _no_answer(url, error) from error
    except (OSError, ValueError) as error:  # ValueError: no URL, or no JSON
        raise _no_answer(url, error) from error


def _no_answer(url: str, error: Exception) -> MoonserveError:
    return MoonserveError(f"no answer from {url}: {error}; give the gateway's address with --url")
