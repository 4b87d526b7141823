"""A byte that flips on the way or at rest is found, counted and computed again; the client notices nothing."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from protocol.keys import BlockKey, block_keys, root_key
from tests.e2e.accounts import Accounts, accounts_of
from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
FLAGS = (
    *("--dtype", "float32", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", "8MiB"),
    *("--store-reads", "always"),
)
PROMPT = random.Random(0).choices(range(256), k=5 * BLOCK_SIZE + 7)
NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("integrity") / "model"
    make_model("llama", folder)
    return folder


def ask(cluster: Cluster, *, max_tokens: int = 12, **parameters: Any) -> dict[str, Any]:
    return cluster.complete(
        PROMPT,
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        **parameters,
    )


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached_tokens(answer: dict[str, Any]) -> int:
    """Tokens of the prompt whose KV was not computed for this answer."""
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def ask_afresh(cluster: Cluster, *, salt: str) -> list[int]:
    """Tokens of an answer with all KV computed anew: keys under another salt are other keys."""
    answer = ask(cluster, cache_salt=salt)
    assert cached_tokens(answer) == 0
    return tokens(answer)


def integrity_failures(accounts: Accounts) -> tuple[int, int, int]:
    """Bad blocks that prefill worker, decode worker and store have counted."""
    prefill, decode, store = (
        accounts.counter(name, "integrity_failures")
        for name in ("prefill-0", "decode-0", "store-0")
    )
    return prefill, decode, store


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_byte_flipped_on_the_way_is_computed_and_sent_again(
    tmp_path: Path, model: Path, transport: str
) -> None:
    flags = (*FLAGS, "--transports", transport, "--fault-corrupt-writes", "2")
    with running_cluster(model, tmp_path, *flags) as cluster, accounts_of(cluster) as accounts:
        # A request that ends at the prefill worker: all that is written are its blocks, to the store.
        first = ask(cluster, max_tokens=1)
        cluster.wait_for("a bad put", lambda: integrity_failures(accounts) == (1, 0, 1))
        assert accounts.store().num_objects == NUM_BLOCKS - 1
        # Another prompt's handoff, whose layers are so small that they leave as one write.
        corrupted = ask_afresh(cluster, salt="corrupted")
        assert integrity_failures(accounts) == (2, 1, 1)
        recomputed = accounts.counter("prefill-0", "recomputed_blocks")
        assert recomputed > 0
        # From here on all arrives. The first prompt's source was suspect: it is computed and put again.
        again = ask(cluster)
        assert cached_tokens(again) < NUM_BLOCKS * BLOCK_SIZE
        wait_until_stored(cluster, accounts, NUM_BLOCKS * 2)
        assert corrupted == tokens(again) == ask_afresh(cluster, salt="clean")
        assert tokens(first) == tokens(again)[:1]
        assert integrity_failures(accounts) == (2, 1, 1)
        assert accounts.counter("prefill-0", "recomputed_blocks") == recomputed
        assert accounts.counter("prefill-0", "handed_off_requests") == 3
        accounts.wait_until_all_is_free()


@pytest.mark.parametrize("layered_loads", ["never", "always"])
def test_a_byte_flipped_in_the_store_is_found_when_it_is_read(
    tmp_path: Path, model: Path, layered_loads: str
) -> None:
    bad = 2
    flags = (*FLAGS, "--layered-loads", layered_loads)
    with running_cluster(model, tmp_path, *flags) as cluster, accounts_of(cluster) as accounts:
        before = ask(cluster)
        wait_until_stored(cluster, accounts)
        offset, length = accounts.places(keys_of(cluster))[bad]
        flip_byte(cluster.pids()["store-0"], offset + length // 2)
        restart_workers(cluster)
        after = ask(cluster)
        assert tokens(after) == tokens(before)
        assert cached_tokens(after) == bad * BLOCK_SIZE
        assert accounts.counter("store-0", "integrity_failures") == 1
        assert accounts.counter("prefill-0", "store_hit_blocks") == bad
        wait_until_stored(cluster, accounts)  # the recomputed block in the corrupt one's place
        restart_workers(cluster)
        healed = ask(cluster)
        assert tokens(healed) == tokens(before)
        assert cached_tokens(healed) == NUM_BLOCKS * BLOCK_SIZE
        assert accounts.counter("store-0", "integrity_failures") == 1
        accounts.wait_until_all_is_free()


def wait_until_stored(cluster: Cluster, accounts: Accounts, num_blocks: int = NUM_BLOCKS) -> None:
    """So many blocks are in the store, and the conductor knows."""
    cluster.wait_for("the write-behind", lambda: accounts.store().num_objects >= num_blocks)

    def indexed() -> int:
        stores = [each for each in cluster.instances() if each["role"] == "store"]
        return sum(each["indexed_blocks"] for each in stores)

    cluster.wait_for("the index", lambda: indexed() >= num_blocks)


def keys_of(cluster: Cluster) -> list[BlockKey]:
    """Of the prompt's full blocks, as gateways make them."""
    with cluster.client() as client:
        fingerprint = client.get("/v1/cluster").json()["fingerprint"]
    return block_keys(root_key(fingerprint), PROMPT, BLOCK_SIZE)


def flip_byte(pid: int, offset: int) -> None:
    """In the store node's segment of objects."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    (start,) = re.findall(r"^([0-9a-f]+)-\S+ rw-s .*/memfd:moonserve:objects", maps, re.MULTILINE)
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(int(start, 16) + offset)
        byte = memory.read(1)[0]
        memory.seek(int(start, 16) + offset)
        memory.write(bytes([byte ^ 0x40]))


def restart_workers(cluster: Cluster) -> None:
    """Kills both workers; returns when their successors, who have nothing cached, are members."""
    pids = {name: pid for name, pid in cluster.pids().items() if name in ("prefill-0", "decode-0")}
    epochs = {name: cluster.epoch(name) for name in pids}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    cluster.wait_for(
        "the successors", lambda: all(cluster.epoch(n) > e for n, e in epochs.items()), 90
    )
