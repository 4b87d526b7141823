"""What no client should send: refused with the right status in OpenAI's form, and nobody else notices."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import psutil
import pytest

from tests.e2e.accounts import accounts_of
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.raw_http import RawClient
from tests.patience import PATIENCE_S
from tests.random_models import VOCAB_SIZE, make_model

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 4_096
GIVES_UP_S = 5
"""What the gateway has with clients that hardly read or send."""

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hostile")
    make_model("llama", folder / "model", max_position_embeddings=MAX_MODEL_LEN)
    flags = (
        *("--dtype", "float32", "--kv-cache-memory", "32MiB", "--served-model-name", "tiny"),
        *("--slow-client-s", str(GIVES_UP_S), "--body-timeout-s", str(GIVES_UP_S)),
    )
    with running_cluster(folder / "model", folder / "logs", *flags) as cluster:
        yield cluster
        with accounts_of(cluster) as accounts:
            accounts.wait_until_all_is_free()
        assert not cluster.tracebacks(), cluster.logs()


@pytest.fixture(autouse=True)
def _still_serving(cluster: Cluster) -> Iterator[None]:
    yield
    assert_serves(cluster)


def assert_serves(cluster: Cluster) -> None:
    answer = cluster.complete([1, 2, 3], max_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


def assert_refused(response: HTTPResponse, status: int, param: str | None = None) -> dict[str, Any]:
    """Fails unless the reply is an error in OpenAI's form; returns it."""
    body = json.loads(response.read())
    assert response.status == status, body
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    assert error["type"].endswith("_error")
    if param is not None:
        assert error["param"] == param, error
    assert "Traceback" not in error["message"]
    return error


def refusal(
    cluster: Cluster, path: str, body: bytes, status: int = 400, param: str | None = None
) -> dict[str, Any]:
    with RawClient(cluster) as client:
        client.send(path, body)
        return assert_refused(client.reply(), status, param)


BAD_JSON = {
    "nothing": b"",
    "not JSON": b"{prompt: hello}",
    "cut off": b'{"prompt": "hel',
    "two documents": b'{"prompt": "a"} {"prompt": "b"}',
    "a list": b"[1, 2, 3]",
    "a string": b'"hello"',
    "null": b"null",
    "a number": b"1e999",
    "invalid UTF-8": b'{"prompt": "\xff\xfe\x80"}',
    "UTF-16": '{"prompt": "hello"}'.encode("utf-16"),
    "a lone surrogate": rb'{"prompt": "\ud800"}',
    "an integer of 10,000 digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}",
    "lists 100,000 deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects 100,000 deep": b'{"prompt": "a", "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "zeros": bytes(1_000),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", BAD_JSON)
def test_a_body_that_is_no_request(cluster: Cluster, path: str, name: str) -> None:
    error = refusal(cluster, path, BAD_JSON[name])
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1_000


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have(cluster: Cluster, path: str, value: str) -> None:
    messages = '"prompt": "a", "messages": [{"role": "user", "content": "a"}]'
    body = f'{{{messages}, "temperature": {value}}}'.encode()
    refusal(cluster, path, body, param="temperature")


BAD_FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt": (
        *(None, 7, True, {}, [], [[]], [""], "", ["a", 1], [1, "a"], [[1], []], [1.5], [True]),
        *([-1], [VOCAB_SIZE], [2**31], [2**32], [2**64], [10**30], [[1], [VOCAB_SIZE]]),
        *([1] * MAX_MODEL_LEN, [1] * 1_000_000, "x" * 1_000_000),
    ),
    "max_tokens": (0, -1, 1.5, "8", True, [], 2**31, 2**64, 10**30, MAX_MODEL_LEN),
    "min_tokens": (-1, 1.5, "8", 2**31, 17),
    "temperature": (-0.1, -1e308, 1e308, "1", [], True),
    "top_p": (0, -1, 1.0001, 1e308, "1"),
    "top_k": (-2, 1.5, 2**31, 2**100, "1"),
    "min_p": (-0.1, 1.1, "0"),
    "n": (0, -1, 129, 2**31, 2**100, 1.5, "1"),
    "seed": (-(2**63) - 1, 2**64, 1.5, "1"),
    "stop": ("", [""], [1], 7, ["x"] * 33, "x" * 1_001),
    "stop_token_ids": ([-1], [VOCAB_SIZE], [2**32], ["1"], "1", [1.5]),
    "presence_penalty": (-2.1, 2.1, "0"),
    "frequency_penalty": (-2.1, 2.1, 1e308),
    "repetition_penalty": (0, -1, 101, "1"),
    "logit_bias": ({"x": 1}, {"1": 101}, {str(VOCAB_SIZE): 1}, {"-1": 1}, {"1": "a"}, [1], "1"),
    "logprobs": (-1, 21, 1.5, "1", 2**100),
    "stream": (1, "true", []),
    "stream_options": (1, "x", []),
    "priority": (2**31, 1.5, "high"),
    "cache_salt": ("", 1, "x" * 1_025),
    "user": (1, []),
    "model": (1, []),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_field_that_cannot_be(cluster: Cluster, name: str) -> None:
    for value in BAD_FIELDS[name]:
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 16, name: value}).encode()
        error = refusal(cluster, COMPLETIONS, body)
        assert error["type"] == "invalid_request_error"
        assert str(error["param"]).startswith(name), (value, error)
        assert len(error["message"]) < 2_000


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "hello",
        ["hello"],
        [{}],
        [{"content": "no role"}],
        [{"role": "", "content": "x"}],
        [{"role": 7, "content": "x"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 7}]}],
        [{"role": "user", "content": "x" * 1_000_000}],
        [{"role": "user", "content": "x"}] * 10_000,
    ],
    ids=lambda messages: repr(messages)[:40],
)
def test_messages_that_are_no_conversation(cluster: Cluster, messages: Any) -> None:
    error = refusal(cluster, CHAT, json.dumps({"messages": messages}).encode())
    assert str(error["param"]).startswith("messages")


def test_a_prompt_beyond_the_context_is_named_so(cluster: Cluster) -> None:
    for prompt in ([1] * MAX_MODEL_LEN, "x" * MAX_MODEL_LEN, "x" * 8_000_000):
        error = refusal(cluster, COMPLETIONS, json.dumps({"prompt": prompt}).encode())
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in error["message"]


def test_an_unknown_model(cluster: Cluster) -> None:
    for model in ("", "gpt-4", "x" * 10_000, "../../etc/passwd"):
        body = json.dumps({"prompt": "a", "model": model}).encode()
        error = refusal(cluster, COMPLETIONS, body, 404, "model")
        assert error["code"] == "model_not_found"


def test_ten_megabytes(cluster: Cluster) -> None:
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    with RawClient(cluster) as client:
        # Refused by its length alone: a client that waits for the answer need not send it.
        client.send(COMPLETIONS, b"", headers={"Content-Length": str(len(body))})
        assert assert_refused(client.reply(), 413)["code"] == "request_too_large"
    with cluster.client() as http:
        response = http.post(COMPLETIONS, content=body)
        assert response.status_code == 413
        chunked = http.post(
            COMPLETIONS, content=(body[i : i + 65_536] for i in range(0, len(body), 65_536))
        )
        assert chunked.status_code == 413
        assert chunked.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("PUT", "/tokenize", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("BREW", COMPLETIONS, 405),
        ("POST", "/v1/completion", 404),
        ("GET", "/", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
        ("GET", "/v1/explain/nothing", 404),
        ("GET", "/v1/models/nothing", 404),
    ],
)
def test_a_wrong_method_or_path(cluster: Cluster, method: str, path: str, status: int) -> None:
    with RawClient(cluster) as client:
        client.send(path, b"", method=method)
        if method == "BREW":  # the HTTP parser knows no such method and answers in plain text
            assert client.reply().status in (400, status)
        else:
            assert_refused(client.reply(), status)


def test_no_content_type_or_another_one_is_read_as_json(cluster: Cluster) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    for content_type in ("", "text/plain", "application/json; charset=latin-1", "x" * 1_000):
        with RawClient(cluster) as client:
            client.send(COMPLETIONS, body, headers={"Content-Type": content_type})
            assert client.reply().status == 200


@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf", "soon", "1e400", ""])
def test_an_slo_that_is_no_time(cluster: Cluster, value: str) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    with RawClient(cluster) as client:
        client.send(COMPLETIONS, body, headers={"X-SLO-TTFT-MS": value or " "})
        assert_refused(client.reply(), 400, "x-slo-ttft-ms")


def test_bytes_that_are_no_http(cluster: Cluster) -> None:
    dice = random.Random(0)
    rubbish = (
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n",
        dice.randbytes(10_000),
    )
    for sent in rubbish:
        with RawClient(cluster) as client:
            client.socket.settimeout(0.5)
            try:
                client.socket.sendall(sent)
                client.socket.recv(1_000)
            except (TimeoutError, ConnectionError):
                continue  # closed, or waiting for the rest


def test_a_body_that_never_comes_whole(cluster: Cluster) -> None:
    with RawClient(cluster) as client:
        client.send(COMPLETIONS, b'{"prompt"', headers={"Content-Length": "1000"})
        assert_serves(cluster)
        assert assert_refused(client.reply(), 408)["code"] == "request_timeout"


@pytest.mark.parametrize("reads", [True, False], ids=["a byte a second", "nothing"])
def test_a_client_that_hardly_reads_delays_nobody_and_is_given_up(
    cluster: Cluster, reads: bool
) -> None:
    """Chunks with 20 alternatives per token are kilobytes: the buffers on the way fill within seconds."""
    stopping = threading.Event()
    with RawClient(cluster, receive_buffer=2_048) as client:
        port = client.socket.getsockname()[1]
        cluster.wait_for("the connection", lambda: port in client_ports(cluster))
        client.ask([1, 2, 3], max_tokens=MAX_MODEL_LEN - 3, logprobs=20, n=8)
        reader = threading.Thread(target=read_slowly, args=(client, stopping, reads))
        reader.start()
        try:
            deadline = time.monotonic() + 3 * PATIENCE_S
            while port in client_ports(cluster):
                assert_serves(cluster)
                assert time.monotonic() < deadline
        finally:
            stopping.set()
            reader.join()
        with pytest.raises(ConnectionResetError):  # nothing is kept for it, in the kernel neither
            read_on(client)
    with accounts_of(cluster) as accounts:
        accounts.wait_until_all_is_free()


def read_slowly(client: RawClient, stopping: threading.Event, reads: bool) -> None:
    """Until told to stop, or the connection ends."""
    while not stopping.wait(1.0):
        if reads and not client.socket.recv(1):
            return


def read_on(client: RawClient) -> None:
    """To the end of the connection."""
    while client.socket.recv(65_536):
        pass


def client_ports(cluster: Cluster) -> set[int]:
    """Where the connections that the gateway has open come from."""
    gateway = psutil.Process(cluster.pids()["gateway-0"])
    return {c.raddr.port for c in gateway.net_connections("tcp") if c.raddr}


def test_hundreds_of_connections_that_say_nothing(cluster: Cluster) -> None:
    clients = [RawClient(cluster) for _ in range(300)]
    try:
        assert_serves(cluster)
    finally:
        for client in clients:
            client.leave()


def test_an_id_that_is_no_id_is_not_taken_up(cluster: Cluster) -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    for given in ("x" * 10_000, "a b", "<script>", "a\tb"):
        with RawClient(cluster) as client:
            client.send(COMPLETIONS, body, headers={"X-Request-Id": given})
            response = client.reply()
            assert response.status == 200
            assert response.headers["x-request-id"] != given


def test_the_same_id_many_times_at_once(cluster: Cluster) -> None:
    wish = {"prompt": [1, 2], "max_tokens": 20, "ignore_eos": True}
    clients = [RawClient(cluster) for _ in range(8)]
    for client in clients:
        client.send(COMPLETIONS, json.dumps(wish).encode(), headers={"X-Request-Id": "same"})
    for client in clients:
        response = client.reply()
        assert response.status == 200
        assert response.headers["x-request-id"] == "same"
        assert json.loads(response.read())["usage"]["completion_tokens"] == 20
        client.leave()
