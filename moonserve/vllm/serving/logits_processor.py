"""Logits processor that applies the sampling parameters which look at a whole answer, in vLLM's worker process.

vLLM makes one of it from the engine argument `logits_processors`. It uses the own engine's sampler, so that penalties,
grammars, bad words and seeded draws mean the same with either engine and do not notice that an answer moves between
engines. A row without such parameters is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from moonserve.engine.model.batch import Slice
from moonserve.engine.model.grammar_masks import GrammarMasks, Mask
from moonserve.engine.model.sampler import adjust, draw_token
from moonserve.protocol.request import RequestId
from moonserve.vllm.serving.model_description import eos_token_ids
from moonserve.vllm.serving.sampling import EXTRA, sampling_of_processor

RowProcessor = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


class WholeAnswerProcessor(AdapterLogitsProcessor):
    """vLLM's logits processor of one engine."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        model = vllm_config.model_config
        self._masks = GrammarMasks(
            Path(model.model), vocab_size=model.get_vocab_size(), eos_token_ids=eos_token_ids(model)
        )

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RowProcessor | None:
        """Returns the processor of one request's rows, or None if it needs none."""
        part = (params.extra_args or {}).get(EXTRA)
        return None if part is None else self._row_processor(part)

    def _row_processor(self, part: dict[str, Any]) -> RowProcessor:
        sampling, draws = sampling_of_processor(part), bool(part["draws"])

        def process(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token_ids = (*prompt_ids, *output_ids)
            piece = Slice(
                request_id=RequestId(part["request_id"]),
                token_ids=token_ids,
                start=len(token_ids) - 1,
                end=len(token_ids),
                block_table=(),
                sampling=sampling,
                num_prompt_tokens=part["num_prompt_tokens"],
                samples=True,
            )
            row = logits.detach().float().cpu().numpy().copy()
            adjust(row, piece, self._mask(piece, sampling.stop_token_ids, len(row)))
            if draws:
                scaled = torch.from_numpy(row) / sampling.temperature
                chosen = draw_token(torch.softmax(scaled, dim=-1).numpy(), sampling, piece.end)
                row = np.full_like(row, -np.inf)
                row[chosen] = 0.0
            return torch.from_numpy(row).to(device=logits.device, dtype=logits.dtype)

        return process

    def _mask(self, piece: Slice, stop_token_ids: Sequence[int] | frozenset[int], size: int) -> Mask | None:
        """Returns the tokens that the grammar allows. One that can no longer be followed ends the answer."""
        if not piece.sampling.grammar:
            return None
        found = self._masks.of([piece])[0]
        if found is not None and found.mask is not None:
            return found.mask
        mask = np.zeros(size, dtype=np.bool_)
        mask[list(stop_token_ids)] = True
        return mask
