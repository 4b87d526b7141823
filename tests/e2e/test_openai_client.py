"""The official OpenAI client against a real cluster with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import openai
import pydantic
import pytest

from tests.e2e.cluster import running_cluster

pytestmark = pytest.mark.e2e

MODEL = "moonserve-demo"
QUESTION = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Complete this Python code:\ndef get_name(self):"},
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = ("--dtype", "float32", "--api-key", "sesame", "--tool-call-parser", "hermes")
    with (
        running_cluster(None, tmp_path_factory.mktemp("logs"), *flags) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="sesame", max_retries=0) as client,
    ):
        yield client


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_answers_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    wish = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**wish)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens <= 24
    assert whole.choices[0].finish_reason in ("stop", "length")
    parts: list[str] = []
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**wish, stream=True, stream_options=options):  # type: ignore[call-overload]
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage
    assert "".join(parts) == whole.choices[0].message.content != ""
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 32 * 32


def test_completions_take_lists_seeds_stops_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["import os\n", "class A:\n"], max_tokens=12, seed=3, n=2, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 12
    plain = client.completions.create(
        model=MODEL, prompt="import os\n", max_tokens=40, temperature=0
    )
    word = plain.choices[0].text[5:8]
    cut = client.completions.create(
        model=MODEL, prompt="import os\n", max_tokens=40, temperature=0, stop=word
    )
    assert cut.choices[0].text == plain.choices[0].text.partition(word)[0]
    assert cut.choices[0].finish_reason == "stop"


class Paint(pydantic.BaseModel):
    """Small enough for any model to finish."""

    color: Literal["red", "blue"]
    name: Annotated[str, pydantic.Field(pattern="^[a-z]{1,8}$")]
    is_dry: bool


def test_an_answer_is_parsed_into_the_class_it_was_asked_for(client: openai.OpenAI) -> None:
    for temperature in (0.0, 1.5):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            response_format=Paint,
            max_tokens=400,
            temperature=temperature,
            seed=1,
        )
        assert isinstance(answer.choices[0].message.parsed, Paint)
        assert answer.choices[0].finish_reason == "stop"


def test_a_function_that_must_be_called_is_whole_and_streamed(client: openai.OpenAI) -> None:
    schema = {**Paint.model_json_schema(), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    wish = {
        **{"model": MODEL, "messages": QUESTION, "tools": [tool], "max_tokens": 400},
        **{"tool_choice": {"type": "function", "function": {"name": "paint"}}, "seed": 3},
    }
    whole = client.chat.completions.create(**wish)  # type: ignore[call-overload]
    [call] = whole.choices[0].message.tool_calls
    assert call.function.name == "paint"
    Paint.model_validate_json(call.function.arguments)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    with client.chat.completions.stream(**wish) as stream:
        types = {event.type for event in stream}
        streamed = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in types
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    free = client.chat.completions.create(**{**wish, "tool_choice": "auto", "max_tokens": 8})  # type: ignore[call-overload]
    assert free.choices[0].message.content


def test_a_wrong_key_an_unknown_model_and_a_long_prompt_raise_the_clients_own_errors(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[20] * 9_000)
    assert caught.value.code == "context_length_exceeded"


def test_the_log_folder_holds_no_secrets(
    client: openai.OpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    logs: list[Path] = list(tmp_path_factory.getbasetemp().glob("logs*/*.log"))
    assert logs
    assert not [path for path in logs if "sesame" in path.read_text()]
