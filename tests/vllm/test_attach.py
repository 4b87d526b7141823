"""Workers beside vLLM servers that run already (`--attach`): the same tokens as one instance, losses, refusals.

The prefill server keeps prompts in a store, too, and publishes what is there.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client import Block, connect
from moonserve.protocol.kv_blocks import BlockKey
from tests import processes
from tests.patience import until
from tests.random_models import make_model
from tests.vllm.clusters import Cluster, collect
from tests.vllm.servers import START_S, TOKEN, VllmServer, running
from tests.vllm.stores import StoreNode, until_quiet

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 300, 500)
SETTINGS = {"max_model_len": 1024, "max_num_seqs": 16}


class Site(Cluster):
    """Two servers, a worker beside each, a conductor and a gateway, which the test has started."""

    def __init__(self, servers: dict[str, VllmServer], url: str, join: str, replay: str) -> None:
        """`join`: of the store; `replay`: of the prefill server's KV events."""
        self.servers = servers
        self.url = url
        self.join = join
        self.replay = replay


def _prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(256), k=length)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    model = folder / "model"
    make_model("llama", model, head_dim=32)  # the least that vLLM's kernels for CPUs take
    ports = {role: (free_port(), free_port()) for role in ("prefill", "decode")}
    store = StoreNode(folder / "store", ssd=False)
    servers = {role: _server(model, folder / role, *ports[role]) for role in ports}
    servers["prefill"].connector = {"join": store.join}
    with contextlib.ExitStack() as stack:
        store.start()
        stack.callback(store.kill)
        stack.enter_context(running(*servers.values()))
        conductor = _start(stack, folder, "conductor", "--instance-id", "conductor")["rpc"]
        for role, (events, replay) in ports.items():
            _start(
                stack, folder, "worker", "--engine", "vllm", "--attach", f"http://127.0.0.1:{servers[role].port}",
                "--role", role, "--instance-id", f"{role}-0", "--conductor", conductor,
                "--kv-events", f"tcp://127.0.0.1:{events}", "--kv-events-replay", f"tcp://127.0.0.1:{replay}",
            )  # fmt: skip
        gateway = _start(
            stack, folder, "gateway", "--port", "0", "--model", str(model), "--conductor", conductor,
            "--worker-patience-s", str(START_S),
        )  # fmt: skip
        found = Site(servers, gateway["http"], store.join, f"tcp://127.0.0.1:{ports['prefill'][1]}")
        until(lambda: len(found.instances()) == 2)
        yield found


def _server(model: Path, log: Path, events: int, replay: int) -> VllmServer:
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
    flags = ("--kv-events-config", json.dumps({**published, "replay_endpoint": f"tcp://*:{replay}"}))
    return VllmServer(model, log.with_suffix(".log"), connector={}, engine=SETTINGS, flags=flags)


def _start(stack: contextlib.ExitStack, folder: Path, verb: str, *flags: str) -> dict[str, str]:
    """Starts a process for as long as the stack lasts. Returns its facts."""
    log = stack.enter_context((folder / "processes.log").open("ab"))
    slow = {"MOONSERVE_TTFT_SLO": "10000", "MOONSERVE_TBT_SLO": "10000"}
    starting = processes.start(verb, *flags, token=TOKEN, stderr=log, environment=slow)
    stack.callback(starting.process.wait)
    stack.callback(starting.process.terminate)
    return starting.facts(START_S)


def test_tokens_are_those_of_one_instance(site: Site) -> None:
    prompts = [_prompt(length) for length in LENGTHS]
    expected = [site.servers["prefill"].complete(prompt, 24, salt="alone").tokens for prompt in prompts]
    assert [site.tokens(prompt, 24) for prompt in prompts] == expected
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(lambda prompt: site.tokens(prompt, 24), prompts)) == expected


def test_hints_reach_the_connector_of_an_attached_server(site: Site) -> None:
    added = []
    with connect(site.join, cluster_token=TOKEN) as store:
        for is_stored in (False, True):
            until_quiet(site.join)
            before = store.stats().total.num_objects
            site.complete(_prompt(100, seed=7), 2, kv_cache={"store": is_stored})
            until_quiet(site.join)
            added.append(store.stats().total.num_objects - before)
    assert added == [0, 3]


def test_kv_moves_between_the_servers_and_the_conductor_knows_their_caches(site: Site) -> None:
    prompt, before = _prompt(320, 1), site.servers["decode"].metric("moonserve_connector_tokens_total", op="fetched")
    first = site.tokens(prompt, 4)
    assert site.servers["decode"].metric("moonserve_connector_tokens_total", op="fetched") >= before + 288
    site.until_known(prompt, first)


def test_the_server_publishes_the_blocks_that_it_has_stored(site: Site) -> None:
    prompt = _prompt(100, 5)
    site.tokens(prompt, 2)

    def stored() -> list[bytes]:
        found = [each for each in _published(site.replay) if each.get("medium") == "STORAGE"]
        return [name for each in found if each["token_ids"] == prompt[:96] for name in each["block_hashes"]]

    until(lambda: len(stored()) == 3)
    with connect(site.join, cluster_token=TOKEN) as store:
        keys = [BlockKey(name) for name in stored()]
        assert store.batch_exists([Block(key, keys[0]) for key in keys]) == [True] * 3


def _published(endpoint: str) -> list[dict[str, Any]]:
    """Returns all KV events of a server."""
    events: list[dict[str, Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.connect(endpoint)
        replay.send_multipart((b"", bytes(8)))
        while payload := replay.recv_multipart()[-1]:
            events += msgspec.msgpack.decode(payload)[1]
    return events


def test_prompts_of_other_salts_share_no_blocks(site: Site) -> None:
    prompt = _prompt(160, 2)
    for salt, is_cached in (("a", False), ("b", False), ("a", True)):
        usage = site.complete(prompt, 2, cache_salt=salt)["usage"]
        assert bool(usage["prompt_tokens_details"]["cached_tokens"]) == is_cached


def test_log_probabilities_come_with_every_token_and_the_prompt(site: Site) -> None:
    answer = site.complete(_prompt(9), 6, logprobs=2, prompt_logprobs=1)
    assert len(answer["logprobs"]["token_logprobs"]) == 6
    assert all(len(top) >= 2 for top in answer["logprobs"]["top_logprobs"])
    assert len(answer["prompt_logprobs"]) == 9


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a+"}, "ignore_eos": False}, "grammar"),
    ],
)
def test_what_a_server_cannot_do_is_refused_by_name(site: Site, parameters: dict[str, Any], name: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        site.complete(_prompt(9), 4, **parameters)
    assert refused.value.code == 400
    assert name in refused.value.read().decode()


def test_a_client_that_leaves_ends_the_request_at_the_server(site: Site) -> None:
    decode = site.servers["decode"]
    with site.stream(_prompt(50, 4), 900) as events:
        for _ in range(5):
            next(events)
        assert decode.metric("vllm:num_requests_running") == 1
    until(lambda: decode.metric("vllm:num_requests_running") == 0)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_answer_goes_on_after_the_loss_of_a_server_which_comes_back(site: Site, role: str) -> None:
    """Its worker is no member meanwhile. An answer needs its prefill server only up to the first token."""
    prompt, moment, server = _prompt(100, 3), threading.Event(), site.servers[role]
    expected = site.tokens(prompt, 600)
    with site.stream(prompt, 600) as events, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(collect, events, moment)
        assert moment.wait(START_S)
        server.kill()
        until(lambda: f"{role}-0" not in site.instances())
        server.start()
        server.wait()
        assert answer.result() == expected
    until(lambda: f"{role}-0" in site.instances())
    assert site.tokens(prompt, 600) == expected
