"""Processes that Ray's actors start understand their flags: the configuration that each would build is built here."""

from __future__ import annotations

from conductor.config import ConductorConfig
from decode_worker.config import DecodeConfig
from deploy.plan import ProcessSpec, Site
from deploy.ray.config import parse_cluster
from deploy.ray.units import Kind, Unit, addresses_of, process_spec, serve_config
from gateway.config import GatewayConfig
from kvstore.config import StoreConfig
from kvstore.directory.config import DirectoryConfig
from prefill_worker.config import PrefillConfig
from protocol.config import load
from tests.deploy.test_plan import CLASSES

DOCUMENT = {
    "conductors": {"count": 2, "port": 7200},
    "prefill": {"cpus": 6.5},
    "gateways": {"count": 2},
    "drain_s": 20,
    "serve": {"block_size": 64, "host": "0.0.0.0", "port": 8080, "api_key": ["k1"]},
}
HOSTS = ("10.0.0.1", "10.0.0.2")


def spec(kind: Kind, number: int = 0, **more: object) -> ProcessSpec:
    config = parse_cluster({**DOCUMENT, **more})
    addresses = addresses_of(config, HOSTS, HOSTS[0])
    site = Site(
        conductor=addresses.conductors,
        model_path="/model",
        host="10.0.0.2",
        drain_s=config.drain_s,
    )
    unit = Unit(kind, number)
    return process_spec(config, unit, serve_config(config, addresses), site, "store-1")


def parsed(spec: ProcessSpec) -> object:
    classes = {**CLASSES, "kvstore.directory": DirectoryConfig}
    return load(classes[spec.module], spec.flags, prog=spec.module, environ=spec.environment)


def test_everybody_knows_each_address_at_which_a_conductor_may_be() -> None:
    everywhere = "10.0.0.1:7200,10.0.0.1:7201,10.0.0.2:7200,10.0.0.2:7201"
    for kind in (Kind.STORE, Kind.PREFILL, Kind.DECODE, Kind.GATEWAY):
        assert parsed(spec(kind)).conductor == everywhere  # type: ignore[attr-defined]


def test_a_conductor_listens_where_it_is_looked_for_and_asks_the_directory_who_leads() -> None:
    config, directory = parsed(spec(Kind.CONDUCTOR, 1)), parsed(spec(Kind.DIRECTORY))
    assert isinstance(config, ConductorConfig)
    assert isinstance(directory, DirectoryConfig)
    assert (config.instance_id, config.host, config.port) == ("conductor-1", "10.0.0.2", 7201)
    assert config.registry == "10.0.0.1:7090"
    assert (directory.port, directory.registry) == (7090, None)


def test_a_redis_takes_the_directorys_place_and_a_lone_conductor_needs_neither() -> None:
    url = "redis://10.0.0.9:6379/0"
    assert getattr(parsed(spec(Kind.CONDUCTOR, registry=url)), "registry") == url  # noqa: B009
    alone = parsed(spec(Kind.CONDUCTOR, conductors={"count": 1}))
    assert isinstance(alone, ConductorConfig)
    assert (alone.instance_id, alone.registry) == ("conductor", None)


def test_workers_compute_on_their_share_beside_the_store_of_their_host() -> None:
    prefill, decode = parsed(spec(Kind.PREFILL, 3)), parsed(spec(Kind.DECODE))
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    assert (prefill.instance_id, prefill.num_threads, prefill.home_store) == (
        "prefill-3",
        6,
        "store-1",
    )
    assert (decode.num_threads, decode.block_size) == (1, 64)
    assert prefill.drain_timeout_s == 20.0
    assert spec(Kind.PREFILL).stop_grace_s > 20.0


def test_stores_listen_on_their_host_and_gateways_where_clients_are() -> None:
    store, gateway = parsed(spec(Kind.STORE, 1)), parsed(spec(Kind.GATEWAY))
    assert isinstance(store, StoreConfig)
    assert isinstance(gateway, GatewayConfig)
    assert (store.instance_id, store.host) == ("store-1", "10.0.0.2")
    assert (gateway.host, gateway.port, gateway.reuse_port) == ("0.0.0.0", 8080, True)
    assert gateway.api_key == ("k1",)
    assert not any("k1" in flag for flag in spec(Kind.GATEWAY).flags)


def test_workers_that_may_change_their_role_have_names_without_one() -> None:
    config = parse_cluster({"serve": {"role_switching": "on"}})
    units = [Unit(kind, number) for kind in (Kind.PREFILL, Kind.DECODE) for number in range(2)]
    assert [unit.name(config) for unit in units] == ["worker-0", "worker-2", "worker-1", "worker-3"]
