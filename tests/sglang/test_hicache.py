"""The HiCache backend keeps SGLang's contract over a real store node. SGLang itself is not installed."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonserve.kvstore.client.connecting import TOKEN_VARIABLE
from moonserve.protocol.errors import ConfigError
from moonserve.sglang.hicache import MoonserveHiCache
from tests.kvstore.node.nodes import TOKEN, Node, running_node

PARAMETERS = {
    "register_mem_pool_host": ["mem_pool_host"],
    "batch_get_v1": ["keys", "host_indices", "extra_info"],
    "batch_set_v1": ["keys", "host_indices", "extra_info"],
    "get": ["key", "target_location", "target_sizes"],
    "batch_get": ["keys", "target_locations", "target_sizes"],
    "set": ["key", "value", "target_location", "target_sizes"],
    "batch_set": ["keys", "values", "target_locations", "target_sizes"],
    "exists": ["key"],
    "batch_exists": ["keys", "extra_info"],
    "get_stats": [],
}
"""Parameters of the methods of SGLang's abstract class, by which it calls them."""


class HostPool:
    """SGLang's host memory in its layer-first layout: K and V of a page in each layer are apart."""

    page_size, num_layers, num_slots, width = 4, 3, 32, 8

    def __init__(self) -> None:
        self.kv_buffer = torch.randn(2, self.num_layers, self.num_slots, self.width, dtype=torch.bfloat16)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pieces = [
            self.kv_buffer[half, layer, first : first + self.page_size]
            for first in indices.tolist()[:: self.page_size]
            for layer in range(self.num_layers)
            for half in range(2)
        ]
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]

    def page(self, number: int) -> torch.Tensor:
        return self.kv_buffer[:, :, number * self.page_size : (number + 1) * self.page_size]


def config(join: str, **changes: Any) -> SimpleNamespace:
    ranks = {f"{name}_{what}": what == "size" for name in ("tp", "pp", "attn_cp") for what in ("rank", "size")}
    fields = {**ranks, "is_mla_model": False, "model_name": "m", "extra_config": {"join": join}}
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--dram", str(16 * 2**20)) as node:
        yield node


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def indices(*pages: int) -> torch.Tensor:
    size = HostPool.page_size
    return torch.tensor([page * size + slot for page in pages for slot in range(size)])


def test_methods_have_the_parameters_of_sglangs_class() -> None:
    for name, parameters in PARAMETERS.items():
        assert list(inspect.signature(getattr(MoonserveHiCache, name)).parameters)[1:] == parameters


def test_pages_come_back_into_other_places_of_another_ranks_pool(node: Node) -> None:
    join = f"node://{node.rpc_address}"
    writer, reader, other = (MoonserveHiCache(config(join, tp_rank=rank, tp_size=2)) for rank in (0, 0, 1))
    source, target = HostPool(), HostPool()
    writer.register_mem_pool_host(source)
    reader.register_mem_pool_host(target)
    assert writer.batch_set_v1(["a", "b"], indices(0, 5)) == [True, True]
    assert reader.batch_exists(["a", "b", "c"]) == 2
    assert other.batch_exists(["a"]) == 0
    assert reader.batch_get_v1(["a", "c", "b"], indices(7, 2, 3)) == [True, False, True]
    assert torch.equal(target.page(7), source.page(0))
    assert torch.equal(target.page(3), source.page(5))
    for each in (writer, reader, other):
        each.close()


def test_single_values(node: Node) -> None:
    backend = MoonserveHiCache(config(f"node://{node.rpc_address}"))
    value, target = torch.randn(5, 6, dtype=torch.bfloat16), torch.zeros(5, 6, dtype=torch.bfloat16)
    assert backend.get("single", target) is None
    assert backend.set("single", value)
    assert backend.get("single", target) is target
    assert torch.equal(target, value)
    assert backend.get("single", torch.zeros(2, dtype=torch.bfloat16)) is None
    assert [backend.exists(key) for key in ("single", "none")] == [True, False]
    backend.close()


def test_without_a_store_pages_are_misses(node: Node) -> None:
    with pytest.raises(ConfigError, match="join"):
        MoonserveHiCache(config(""))
    backend = MoonserveHiCache(config("node://127.0.0.1:1"))
    backend.register_mem_pool_host(HostPool())
    assert backend.batch_exists(["a"]) == 0
    assert backend.batch_get_v1(["a"], indices(0)) == [False]
    assert backend.batch_set_v1(["a"], indices(0)) == [False]
    backend.close()
