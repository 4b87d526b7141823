"""Answers in a given form from a real cluster with a random model: all are valid, the same as one engine's, and go on
unharmed when a worker dies in the middle."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import Generation, generate
from gateway.wishes.forms import json_rule
from protocol.request import SamplingParams
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.sse import read_completion
from tests.random_models import EOS, make_model

pytestmark = pytest.mark.e2e

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-num-batched-tokens", "64")
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["host", "device", "Gerät"]},
        "blocks": {"type": "integer", "minimum": 0, "maximum": 9999},
        "pinned": {"type": "boolean"},
    },
    "required": ["name", "kind", "blocks", "pinned"],
    "additionalProperties": False,
}
LONG: dict[str, Any] = {"type": "array", "items": PLACE, "minItems": 12, "maxItems": 14}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("structured")
    make_model("llama", folder / "model", max_position_embeddings=2_048)
    with running_cluster(folder / "model", folder / "logs", *FLAGS) as cluster:
        yield cluster


def prompt_of(name: str, length: int = 90) -> list[int]:
    return random.Random(name).choices(range(256), k=length)


def wish(schema: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return {
        "response_format": format,
        "return_token_ids": True,
        "max_tokens": 1_500,
        **parameters,
    }


def one_engines(folder: Path, prompts: list[list[int]], sampling: list[Any]) -> list[Generation]:
    config = load_model_config(folder)
    layout = config.kv_layout(32, "float32")
    return generate(
        Engine.load(folder, config=config, layout=layout, num_blocks=300), prompts, sampling
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_valid_and_those_of_one_engine(cluster: Cluster, temperature: float) -> None:
    prompts = [prompt_of(f"{temperature} {number}", 20 + 50 * number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda number: cluster.complete(
                    prompts[number], **wish(PLACE, seed=number, temperature=temperature)
                ),
                range(4),
            )
        )
    sampling = [
        SamplingParams(
            max_tokens=1_500,
            temperature=temperature,
            seed=number,
            stop_token_ids=frozenset({EOS}),
            grammar=f"start: {json_rule(PLACE)}",
        )
        for number in range(4)
    ]
    expected = one_engines(cluster.log_dir.parent / "model", prompts, sampling)
    for answer, reference in zip(answers, expected, strict=True):
        [choice] = answer["choices"]
        jsonschema.validate(json.loads(choice["text"]), PLACE)
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == reference.token_ids


def test_other_parameters_go_with_a_form(cluster: Cluster) -> None:
    prompt = prompt_of("parameters")
    answer = cluster.complete(
        prompt,
        **wish(PLACE, n=3, seed=7, logprobs=2, min_tokens=1_400, presence_penalty=1.5),
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), PLACE)
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    [stopped] = cluster.complete(prompt, **wish(PLACE, seed=7, stop=['"kind"']))["choices"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"].startswith("{")
    assert '"kind' not in stopped["text"]
    [cut] = cluster.complete(prompt, **wish(PLACE, max_tokens=4))["choices"]
    assert cut["finish_reason"] == "length"
    [matched] = cluster.complete(prompt, guided_regex="[a-f]{3}-[0-9]{2}", max_tokens=50)["choices"]
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", matched["text"])
    [chosen] = cluster.complete(prompt, guided_choice=["Zürich", "Genève"])["choices"]
    assert chosen["text"] in ("Zürich", "Genève")


def test_a_decode_worker_that_dies_in_the_middle_of_an_object_changes_nothing(
    cluster: Cluster,
) -> None:
    body = {"prompt": prompt_of("killed"), **wish(LONG, temperature=0)}
    epochs: list[int] = []

    def kill(count: int) -> None:
        if count >= 25 and not epochs:
            epochs.append(cluster.kill("decode-0"))

    with cluster.client() as client:
        undisturbed = read_completion(client, body)
        disturbed = read_completion(client, body, kill)
    assert len(undisturbed[1]) > 300
    jsonschema.validate(json.loads(undisturbed[0]), LONG)
    assert disturbed == undisturbed, cluster.logs()
    assert epochs
