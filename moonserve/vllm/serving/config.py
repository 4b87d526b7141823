"""Options of workers whose engine is vLLM, and the engine arguments that follow from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.config import option
from moonserve.protocol.process.lifecycle import ProcessConfig
from moonserve.protocol.process.tracing import TracingConfig

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

PROCESSOR = "moonserve.vllm.serving.logits_processor:WholeAnswerProcessor"


@dataclass(frozen=True, kw_only=True)
class EngineWorkerConfig(ProcessConfig, TracingConfig):
    """Options of a worker whose engine is vLLM, wherever that runs."""

    drain_timeout_s: float = option(5.0, help="seconds that requests may take to finish when the worker stops")
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")


@dataclass(frozen=True, kw_only=True)
class VllmConfig(EngineWorkerConfig):
    """Options of a worker with `--engine vllm`, of either role."""

    model: str = option(help="local Hugging Face folder or hub name")
    max_model_len: int | None = option(
        None, help="longest prompt plus output in tokens; default: what model and memory allow"
    )
    dtype: str = option("auto", help="data type of weights and computation, as vLLM names it")
    kv_cache_memory: int | None = option(None, help="bytes of KV; default: vLLM's", unit="bytes")
    vllm: tuple[str, ...] = option(
        (), help="an engine option of vLLM's, as --vllm.max-num-seqs 64; may be repeated", passed_on=True
    )
    kv_connector: bool = option(
        True, help="move KV with moonserve's connector; without, decode workers compute prompts again"
    )
    kv_join: str = option(
        "",
        help="registry of the store nodes that keep prompts' KV, host:port or redis://…; default: none keeps it",
        masked=True,  # may contain a password
    )
    seeded_draws: str = option(
        "auto",
        help="exact = a drawn token depends on seed and position only, as with the own engine, also after a loss; "
        "vllm = vLLM's sampler draws, which is faster on GPUs; auto = exact on CPUs",
        choices=("auto", "exact", "vllm"),
    )

    def engine_args(self, folder: Path) -> AsyncEngineArgs:
        """Returns the engine arguments. `folder`: for sockets. Imports vLLM, which takes seconds. Raises ConfigError
        with vLLM's message for an option that it does not know."""
        from vllm.config import KVEventsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        parser = _parser()
        flags = [f"--{item}" for item in self._own_items() + self.vllm]
        args = AsyncEngineArgs.from_cli_args(parser.parse_args(flags))
        args.logits_processors = [PROCESSOR, *(args.logits_processors or ())]
        if args.kv_events_config is None:
            args.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=f"ipc://{folder}/kv-events",
                replay_endpoint=f"ipc://{folder}/kv-event-replay",
            )
        return args

    def _own_items(self) -> tuple[str, ...]:
        """Returns the options of vLLM that follow from the worker's own; later ones of `--vllm.` have precedence."""
        items = [f"model={self.model}", f"dtype={self.dtype}", "disable-log-stats"]
        if self.max_model_len is not None:
            items.append(f"max-model-len={self.max_model_len}")
        if self.kv_cache_memory is not None:
            items.append(f"kv-cache-memory-bytes={self.kv_cache_memory}")
        if self.kv_connector:
            items.append(f"kv-transfer-config={json.dumps(_connector(self.kv_join))}")
        return tuple(items)


def _connector(join: str) -> dict[str, Any]:
    return {
        "kv_connector": "MoonserveConnector",
        "kv_connector_module_path": "moonserve.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"join": join},
    }


def _parser() -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        """vLLM's parser, whose errors are raised instead of printed."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"--vllm: {message}")

    return AsyncEngineArgs.add_cli_args(Parser(prog="vllm"))
