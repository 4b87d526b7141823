"""Workloads with the figures of table 2 in FAST'25: requests, mean input, mean output and cache ratio of three traces.

Only these figures are published; each trace is spread over an hour. How prompts are shared is this project's guess: a
chat whose turns extend each other, agents with long system prompts of unequal popularity, and questions about documents
beside short chats. The free numbers were set so that the mean over seeds meets the row.
"""

from __future__ import annotations

from traces.synthesis.arrivals import ArrivalSpec
from traces.synthesis.draws import Constant, LogNormal
from traces.synthesis.workload import WorkloadSpec

_HOUR_S = 3_600

# name → (requests, mean input, mean output, cache ratio), as published
TABLE_2 = {
    "conversation": (12_031, 12_035, 343, 0.40),
    "tool-agent": (23_608, 8_596, 182, 0.59),
    "synthetic": (3_993, 15_325, 149, 0.66),
}

PRESETS = {
    "conversation": WorkloadSpec(
        arrivals=ArrivalSpec(rate=12_031 / _HOUR_S),
        num_requests=12_031,
        input_tokens=LogNormal(10_450, 1.1),
        output_tokens=LogNormal(343, 0.8),
        system_prompts=1,
        system_tokens=Constant(512),
        session_share=0.405,
        turns=2.6,
        turn_tokens=LogNormal(1_250, 1.3),
        think_s=LogNormal(170, 0.9),
    ),
    "tool-agent": WorkloadSpec(
        arrivals=ArrivalSpec(rate=23_608 / _HOUR_S),
        num_requests=23_608,
        input_tokens=LogNormal(3_930, 1.1),
        output_tokens=LogNormal(182, 0.9),
        system_prompts=40,
        system_zipf=1.2,
        system_tokens=LogNormal(3_680, 0.2),
        session_share=0.105,
        turns=4.0,
        turn_tokens=LogNormal(700, 1.0),
        think_s=LogNormal(30, 1.0),
    ),
    "synthetic": WorkloadSpec(
        arrivals=ArrivalSpec(rate=3_993 / _HOUR_S),
        num_requests=3_993,
        input_tokens=LogNormal(2_500, 1.1),
        output_tokens=LogNormal(149, 0.9),
        system_share=0.0,
        session_share=0.5,
        turns=3.0,
        turn_tokens=LogNormal(300, 1.0),
        think_s=LogNormal(60, 1.0),
        document_share=0.5,
        questions=3.3,
        document_tokens=LogNormal(26_300, 0.7),
        question_tokens=LogNormal(150, 0.8),
    ),
}
