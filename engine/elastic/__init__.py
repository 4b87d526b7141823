"""Several models share physical memory: addresses for each, pages mapped where blocks live (after kvcached)."""

from __future__ import annotations

from engine.elastic.actions import Reserve
from engine.elastic.cpu import CpuBacking
from engine.elastic.model import ElasticModel, Pin
from engine.elastic.pool import ElasticPool, ModelStats, PoolStats

__all__ = ["CpuBacking", "ElasticModel", "ElasticPool", "ModelStats", "Pin", "PoolStats", "Reserve"]
