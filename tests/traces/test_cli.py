"""Tests of the commands that take a trace: help for each verb, and one line for each wrong option."""

from pathlib import Path

import pytest

from moonserve.__main__ import TRACES_VERBS as VERBS
from moonserve.protocol.process.config import EXIT_CONFIG
from tests.commands import Command
from tests.traces.made import write_sessions


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, moonserve: Command) -> None:
    assert f"usage: moonserve traces {verb}" in moonserve("traces", verb, "--help", ends=0).out


# command → (options, a part of the error message)
WRONG = {
    "traces": [("analyse", "did you mean analyze?")],
    "traces analyze": [
        ("", "--trace must be given"),
        ("absent.jsonl", "cannot read the trace"),
        ("binary", "is no text file"),
        ("t.jsonl --limit 0", "--limit must be at least 1"),
        ("t.jsonl --window-s 0", "--window-s must be above 0"),
        ("t.jsonl --capacities 3M", "--capacities takes numbers"),
        ("t.jsonl --capacities 0", "from 1 up"),
    ],
    "traces synthesize --out new.jsonl": [
        ("--requests 0", "--requests must be at least 1"),
        ("--duration 0", "--duration must be above 0"),
        ("--duration 1e-9", "not one request comes in that time"),
        ("--rate 0", "--rate must be above 0"),
        ("--rate nan", "--rate must be above 0"),
        ("--preset chat", "--preset is one of conversation"),
        ("--like absent", "cannot read the trace absent"),
        ("--like t.jsonl --preset synthetic", "--preset and --like exclude each other"),
        ("--like t.jsonl --turns 2", "--turns and --like exclude each other"),
        ("--like t.jsonl --rate -1", "must be above 0"),
        ("--burstiness 2", "--burstiness is for --arrivals gamma"),
        ("--turn-tokens many", "--turn-tokens: 'many' is no distribution"),
        ("--turn-tokens lognormal:0:1", "lognormal:MEAN:SIGMA"),
        ("--think-s empirical:absent", "cannot read absent"),
        ("--session-share 2", "--session-share is a share"),
        ("--turns 0.5", "--turns must be at least 1"),
        ("--system-zipf -1", "--system-zipf must be 0"),
        ("--arrivals gamma --burstiness 0", "--burstiness must be above 0"),
        ("--diurnal-amplitude 2", "--diurnal-amplitude is from 0 to 1"),
        ("--session-share 0.9 --document-share 0.9", "more than 1"),
        ("--out .", "cannot write the trace"),
        ("--out binary/t", "cannot write the trace"),
    ],
    "simulate t.jsonl --prefill 1 --decode 1": [
        ("--prefill 0", "--prefill"),
        ("--policy fastest", "fastest"),
        ("--coupled loosely", "loosely"),
        ("--model-profile gpt", "--model-profile"),
        ("--faults prefill-0", "INSTANCE@SECONDS"),
        ("--faults prefill-7@1", "prefill-7"),
        ("--role-switching on --faults prefill-0@1", "--faults"),
        ("--block-size 256", "--block-size"),
        ("--speedup 0", "--speedup"),
        ("--nic-gbit 0", "--nic-gbit"),
        ("--report binary/x", "--report"),
    ],
    "plan t.jsonl": [
        ("--nodes 1", "--nodes"),
        ("--target 1.5", "--target"),
        ("--target nan", "--target"),
        ("--slo-ttft 0", "--slo-ttft"),
        ("--slo-tbt inf", "--slo-tbt"),
        ("--speedup 0", "--speedup"),
        ("--limit 0", "--limit"),
        ("--policies fastest", "fastest"),
        ("--policies ,", "--policies"),
        ("--policies random,random", "twice"),
        ("--model-profile absent.json", "absent.json"),
        ("--dram-tokens 0", "--dram-tokens"),
        ("--processes 0", "--processes"),
        ("--out binary/out", "binary/out"),
        ("--trace absent.jsonl", "absent.jsonl"),
    ],
    "replay t.jsonl": [
        ("--limit -1", "--limit must be at least 1"),
        ("--speedup nan", "--speedup must be above 0"),
        ("--scale-lengths inf", "--scale-lengths must be above 0"),
        ("--url http://127.0.0.1:1", "no OpenAI-compatible endpoint"),
    ],
    "traces fetch": [("--into t.jsonl", "cannot write to --into t.jsonl: File exists")],
}


@pytest.mark.parametrize(
    ("command", "options", "words"), [(command, *row) for command, rows in WRONG.items() for row in rows]
)
def test_wrong_options_are_one_line_and_exit_code_2_before_anything_is_done(
    command: str, options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moonserve: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sessions(Path("t.jsonl"), 20)
    Path("binary").write_bytes(b"\x1f\x8b\xff\xfe\n")
    told = moonserve(*command.split(), *options.split(), ends=EXIT_CONFIG)
    (line,) = told.err.splitlines()
    assert words in line
    assert line.startswith("moonserve")
    assert told.out == ""
    assert not {path.name for path in tmp_path.rglob("*")} & {"new.jsonl", "plan.json", "index.html"}
