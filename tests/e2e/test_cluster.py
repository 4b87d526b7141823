"""The path of every request on one real cluster: parity, streams, cancellation, the `openai` client, a killed worker
and a flipped byte. The other files of this folder test each in depth (`make test-all`)."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from moonserve.models import demo_model_path
from tests.e2e.cluster import GREEDY, UNHURRIED, Cluster, cached_of, prompt_of, running_cluster, tokens_of
from tests.e2e.load import read_choice
from tests.e2e.reference import continuations, load_reference, num_ties
from tests.processes import binary
from tests.terminal import terminal

BLOCK_SIZE = 32
CHUNK = 100
LENGTHS = (1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, 2 * CHUNK + 1, 300)
"""Lengths in tokens of prompts that end within or at a border of a block or a chunk."""
NUM_TOKENS = 12
WORKERS = ("prefill-0", "decode-0")
LONG_ANSWER = 4_000
"""Tokens of an answer that takes seconds, so that a worker's failure hits its stream."""
MODEL = "moonserve-demo"
CLIENTS = Path(__file__).parent / "clients"
PROGRAMS = Path(__file__).parents[2] / ".venv-clients" / "bin"
QUESTION = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Complete this Python code:\ndef get_name(self):"},
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cuts = ("--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", str(CHUNK))
    keys = ("--api-key", "sesame", "--kv-cache-memory", "64MiB", "--tool-call-parser", "hermes")
    folder = tmp_path_factory.mktemp("cluster")
    with running_cluster(None, folder, *UNHURRIED, *cuts, *keys) as started:
        started.headers["Authorization"] = "Bearer sesame"
        yield started
        assert not started.tracebacks(), started.logs()
        assert "sesame" not in started.logs()


@pytest.fixture(autouse=True)
def _nothing_stays_behind(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.wait_until_all_is_free()


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="sesame", max_retries=0) as made:
        yield made


def test_tokens_equal_those_of_transformers_computed_and_cached(cluster: Cluster) -> None:
    reference = load_reference(demo_model_path())
    prompts = [prompt_of(length, length, reference.config.vocab_size) for length in LENGTHS]
    expected = continuations(reference, prompts, NUM_TOKENS)
    # The last token is always computed.
    full_blocks = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
    for cached in ([0] * len(LENGTHS), full_blocks):
        answers = [cluster.greedy(prompt, NUM_TOKENS, logprobs=0) for prompt in prompts]
        ties = [num_ties(*pair) for pair in zip(answers, expected, strict=True)]
        assert sum(ties) <= 1, "ties are rare"
        assert list(map(cached_of, answers)) == cached


def test_the_openai_client_gets_the_same_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**wish)
    chunks = list(client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content != ""
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


class Paint(pydantic.BaseModel):
    """Schema that is small enough for any model to finish."""

    color: Literal["red", "blue"]
    name: Annotated[str, pydantic.Field(pattern="^[a-z]{1,8}$")]
    is_dry: bool


def test_the_openai_client_parses_structured_answers_and_tool_calls(client: openai.OpenAI) -> None:
    wish: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "seed": 3}
    answer = client.chat.completions.parse(**wish, response_format=Paint, temperature=1.5)
    assert isinstance(answer.choices[0].message.parsed, Paint)
    assert answer.choices[0].finish_reason == "stop"
    schema = {**Paint.model_json_schema(), "additionalProperties": False}
    wish["tools"] = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "paint"}}
    [call] = client.chat.completions.create(**wish, tool_choice=named).choices[0].message.tool_calls
    Paint.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**wish, tool_choice=named) as stream:
        assert "tool_calls.function.arguments.done" in {event.type for event in stream}
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


@pytest.mark.slow
def test_the_openai_client_for_node_and_calls_of_open_webui_get_their_answers(cluster: Cluster, tmp_path: Path) -> None:
    """The last call is an answer that its reader stops: its worker must not go on."""
    npm = binary("npm")
    folder = shutil.copytree(CLIENTS, tmp_path / "clients")
    subprocess.run([npm, "ci", "--silent", "--no-audit", "--no-fund"], cwd=folder, check=True)
    dropped = cluster.counter("decode-0", "requests_dropped")
    subprocess.run(["node", "check.mjs", cluster.url, "sesame", MODEL], cwd=folder, check=True)
    cluster.wait_for("its stop", lambda: cluster.counter("decode-0", "requests_dropped") > dropped)


def run_program(name: str, *arguments: str) -> None:
    """Runs a program of `make .venv-clients`, twice if it fails: a busy machine may be too slow for its own limits."""
    if not (PROGRAMS / name).exists():
        pytest.skip("needs make .venv-clients")
    # A list of costs comes from the package instead of another host. guidellm would start ten processes.
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    command = [str(PROGRAMS / name), *arguments]
    assert any(subprocess.run(command, env=environ, check=False).returncode == 0 for _ in range(2))


@pytest.mark.slow
def test_langchain_and_litellm_get_their_answers(cluster: Cluster) -> None:
    run_program("python", str(CLIENTS / "check.py"), cluster.url, "sesame", MODEL)


@pytest.mark.slow
def test_aiperf_measures_every_request(cluster: Cluster, tmp_path: Path) -> None:
    server = ("--url", cluster.url, "--api-key", "sesame", "--model", MODEL, "--tokenizer", str(demo_model_path()))
    load = ("--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", "24", "--isl", "64")
    length = ("--osl", "16", "--extra-inputs", "ignore_eos:true")
    run_program("aiperf", "profile", *server, *load, *length, "--output-artifact-dir", str(tmp_path), "--ui", "none")
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 24
    assert not report["error_summary"]
    assert report["usage_completion_tokens"]["min"] == report["usage_completion_tokens"]["max"] == 16
    assert 0 < report["time_to_first_token"]["p50"] < report["request_latency"]["p50"]


@pytest.mark.slow
def test_guidellm_replays_a_trace_of_mooncakes_format(cluster: Cluster, tmp_path: Path) -> None:
    """Its prompts share 1,024 tokens, which are not computed again for those that come later."""
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    lengths = {"input_length": 1124, "output_length": 8}
    records = [{"timestamp": 500 * i, **lengths, "hash_ids": [0, 1, 2 + i]} for i in range(12)]
    trace.write_text("\n".join(map(json.dumps, records)))
    cached = cluster.metric("vllm:prompt_tokens_cached_total")
    backend = f"kind=openai_http,target={cluster.url},api_key=sesame,model={MODEL}"
    data = f"kind=mooncake,source.kind=json_file,source.path={trace}"
    asked = ("--backend", backend, "--data", data, "--profile", "kind=replay,time_scale=0.001")
    asked += ("--tokenizer", f"kind=huggingface_auto,model={demo_model_path()}")
    run_program("guidellm", "run", *asked, "--output", f"kind=json,path={report}", "--disable-console-interactive")
    figures = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals = figures["request_totals"]
    assert totals["errored"] == totals["incomplete"] == 0
    assert len(records) // 2 <= totals["successful"] <= len(records), "on a busy machine it once counted one too few"
    assert figures["output_token_count"]["successful"]["min"] == 8
    assert cluster.metric("vllm:prompt_tokens_cached_total") - cached >= 1024


def test_the_anthropic_client_gets_the_same_messages_streamed_and_whole(cluster: Cluster) -> None:
    import anthropic  # imported here, as it takes every test process more than a second

    wish: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Write a loop."}]}
    wish |= {"max_tokens": 24, "system": "Hi.", "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=cluster.url, api_key="sesame", max_retries=0) as client:
        whole = client.messages.create(**wish)
        with client.messages.stream(**wish) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        assert text == whole.content[0].text == streamed.content[0].text != ""
        assert streamed.stop_reason == whole.stop_reason
        counted = client.messages.count_tokens(**{name: wish[name] for name in ("model", "messages", "system")})
        for usage in (whole.usage, streamed.usage):
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
        stop = text[6:9]
        stopped = client.messages.create(**wish, stop_sequences=["never", stop])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
        assert stopped.content[0].text == text[: text.index(stop)]

        schema, choice = {**Paint.model_json_schema(), "additionalProperties": False}, {"type": "tool", "name": "paint"}
        tools: dict[str, Any] = {"tools": [{"name": "paint", "input_schema": schema}], "tool_choice": choice}
        wish |= {"max_tokens": 400}
        call = client.messages.create(**wish, **tools)
        [block] = call.content
        assert (block.type, call.stop_reason) == ("tool_use", "tool_use")
        Paint.model_validate(block.input)
        with client.messages.stream(**wish, **tools) as stream:
            [again] = stream.get_final_message().content
        assert again.input == block.input
        picture = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        with pytest.raises(anthropic.BadRequestError, match="'image' are not supported"):
            client.messages.create(**wish | {"messages": picture})
        with pytest.raises(anthropic.NotFoundError, match="does not have the model"):
            client.messages.create(**wish | {"model": "claude"})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="guess").messages.create(**wish)


def test_a_chat_in_a_terminal_prints_the_answer_stops_it_and_goes_on(cluster: Cluster, client: openai.OpenAI) -> None:
    command = [sys.executable, "-m", "moonserve", "chat", "--max-tokens", "24", "--temperature", "0"]
    command += ["--system", QUESTION[0]["content"]]
    environ = {"MOONSERVE_URL": cluster.url, "MOONSERVE_API_KEY": "sesame"}
    wish: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    expected = client.chat.completions.create(**wish).choices[0].message.content
    quick = [*command, "--quick", QUESTION[1]["content"]]
    printed = subprocess.run(quick, env=os.environ | environ, capture_output=True, text=True, check=True)
    assert printed.stdout == f"{expected}\n"
    assert re.search(r"first token after .* prompt tokens cached", printed.stderr)
    with terminal(command, environ) as shown:
        shown.wait_for("> ")
        with cluster.stopped("decode-0"):
            shown.type("What?\n")
            shown.wait_for("waiting for the first token")
            shown.type("\x03")
            shown.wait_for("> ")
        shown.type("Go on.\n")
        shown.wait_for("(?s)first token after.*> ")
        shown.type("\x04")
        assert shown.ended() == 0
    with terminal([*command, "--model", "gpt-9"], environ) as shown:  # an error does not end the conversation
        shown.wait_for("> ")
        shown.type("What?\n")
        shown.wait_for("(?s)does not have the model 'gpt-9'.*; ask again.*> ")
        shown.type("\x04")
        assert shown.ended() == 0


def test_a_client_that_leaves_frees_everything(cluster: Cluster) -> None:
    """Retries, because on a busy machine the answer may be complete before the client leaves."""
    assert any(is_dropped(cluster) for _ in range(5))


def is_dropped(cluster: Cluster) -> bool:
    dropped = cluster.counter("decode-0", "requests_dropped")
    wish = {"prompt": [5, 6, 7], "max_tokens": LONG_ANSWER, "stream": True, **GREEDY}
    with cluster.client() as client, client.stream("POST", "/v1/completions", json=wish) as reply:
        assert len(list(itertools.islice(filter(None, reply.iter_lines()), 5))) == 5
    cluster.wait_until_all_is_free()
    return cluster.counter("decode-0", "requests_dropped") > dropped


@pytest.mark.parametrize("victim", WORKERS)
def test_a_stream_has_the_same_tokens_when_a_worker_is_killed(cluster: Cluster, victim: str) -> None:
    wish = {"prompt": prompt_of("killed", 75), "max_tokens": 200, "seed": 3}
    wish |= {**GREEDY, "temperature": 0.8}
    kill_now, killed = cluster.killer(victim), list[int]()

    def on_tokens(count: int) -> None:
        if count >= 20 and not killed:
            killed.append(kill_now())

    with cluster.client() as client:
        undisturbed = read_choice(client, wish)
        disturbed = read_choice(client, wish, on_tokens)
    assert disturbed.token_ids == undisturbed.token_ids
    cluster.wait_for("its successor", lambda: cluster.epoch(victim) > killed[0])


def test_a_byte_flipped_in_the_store_is_found_and_computed_again(cluster: Cluster) -> None:
    prompt, bad = prompt_of("flipped", 5 * BLOCK_SIZE + 7), 2
    before = cluster.greedy(prompt, NUM_TOKENS)
    cluster.wait_until_stored([prompt], BLOCK_SIZE)
    cluster.flip_byte(prompt, bad, BLOCK_SIZE)
    cluster.restart(*WORKERS)
    names = [f"vllm:{name}_total" for name in ("prefix_cache_hits", "external_prefix_cache_hits")]
    hits = [cluster.metric(name) for name in names]
    after = cluster.greedy(prompt, NUM_TOKENS)
    assert tokens_of(after) == tokens_of(before)
    assert cached_of(after) == bad * BLOCK_SIZE
    assert [cluster.metric(name) for name in names] == [hits[0], hits[1] + bad * BLOCK_SIZE], "all from the store"
    cluster.wait_for("its count", lambda: cluster.counter("store-0", "integrity_failures") == 1)
