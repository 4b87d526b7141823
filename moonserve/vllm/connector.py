"""`MoonserveConnector`: vLLM's KV blocks in moonserve's store, and from prefill to decode servers.

See docs/vllm.md. The interface is vLLM's KV connector V1; this module only translates between it and the two halves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from moonserve.protocol.errors import ConfigError
from moonserve.vllm.kv.scheduler import ConnectorScheduler
from moonserve.vllm.kv.settings import ConnectorSettings, model_identity, namespace
from moonserve.vllm.kv.step_plan import StepPlan, StepReport
from moonserve.vllm.kv.worker import ConnectorWorker
from moonserve.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from moonserve.vllm.vllm_cache import cache_groups_of, extras_of, memory_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

log = logging.getLogger(__name__)


@dataclass
class HandoffAddress(KVConnectorHandshakeMetadata):
    """Address at which decode servers reach a worker."""

    address: str


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """What workers report, on its way to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report + other.report)


class MoonserveConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector for vLLM 0.31 and 0.32."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError for settings and models that it does not support, PeerLost without a store."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        transfer = self._kv_transfer_config
        settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
        _require_supported(vllm_config)
        if transfer.kv_load_failure_policy != "recompute":
            log.warning('blocks that cannot be loaded fail their request: set kv_load_failure_policy to "recompute"')
        groups = cache_groups_of(kv_cache_config)
        meaning = namespace_of(vllm_config, kv_cache_config, settings)
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(
                settings,
                groups,
                meaning,
                num_ranks,
                extras_of,
                saves=transfer.is_kv_producer,
                loads=transfer.is_kv_consumer,
                publishes=_publishes(vllm_config),
            )
        else:
            rank = get_tensor_model_parallel_rank()
            self._worker = ConnectorWorker(settings, groups, meaning, rank, hands_off=transfer.is_kv_producer)

    # In the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._planner.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        ranks = [metadata[rank] for rank in sorted(metadata)]
        self._planner.addresses = [each.address for each in ranks if isinstance(each, HandoffAddress)]

    def on_new_request(self, request: Any) -> None:
        self._planner.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._planner.matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return PlanMetadata(self._planner.plan_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._planner.loads_ended(connector_output.finished_recving or ())
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            self._planner.reported(metadata.report)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Yields vLLM's KV events of the store. They name a block by its key there, as the store's own events do."""
        for stored in self._planner.take_stored():
            yield BlockStored(
                block_hashes=list(stored.keys),
                parent_block_hash=stored.parent,
                token_ids=stored.token_ids,
                block_size=stored.block_size,
                lora_id=None,
                medium=MEDIUM_STORAGE,
                lora_name=None,
                group_idx=stored.group,
                locality="REMOTE",
            )

    def has_pending_push_work(self) -> bool:
        return self._planner.is_waiting()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._planner.finished(request)  # blocks that are still read are pinned

    # In the workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._mover.register(memory_of(kv_caches))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return HandoffAddress(self._mover.address) if self._mover.address else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mover.start_loads(self._step_plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored as wholes, once a step has computed them."""

    def wait_for_save(self) -> None:
        self._mover.step_computed(self._step_plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, failed = self._mover.take_loaded()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._mover.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._mover.take_report()
        return None if report is None else ReportMetadata(report)

    # In both

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        counts = (self._worker or self._planner).take_counts()
        return ConnectorStats(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    @property
    def _planner(self) -> ConnectorScheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _mover(self) -> ConnectorWorker:
        assert self._worker is not None
        return self._worker

    @property
    def _step_plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        return metadata.plan


def _publishes(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def _log_as_vllm() -> None:
    """Sends moonserve's log records where vLLM's go."""
    ours, theirs = logging.getLogger("moonserve"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, theirs.propagate
    ours.setLevel(theirs.level)


def _require_supported(vllm_config: VllmConfig) -> None:
    """Raises ConfigError for parallelism and decoding whose KV the connector does not know how to move."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(f"MoonserveConnector does not support {name} {getattr(parallel, name)}: set it to 1")


def namespace_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings) -> str:
    """Returns what must be equal at two servers for their blocks to be interchangeable."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    model_id = settings.model_id or model_identity(model.model, model.revision, model.hf_config.to_dict())
    return namespace(
        (
            "vllm", vllm.__version__, model_id, model.dtype, model.quantization, cache.cache_dtype,
            kv_cache_config.kv_cache_layout, vllm_config.parallel_config.tensor_parallel_size,
            [(type(g.kv_cache_spec).__name__, g.kv_cache_spec.block_size, g.layer_names)
             for g in kv_cache_config.kv_cache_groups],
            vllm_config.attention_config.backend, vllm_config.device_config.device_type,
            torch.backends.cpu.get_cpu_capability(),
        )
    )  # fmt: skip
