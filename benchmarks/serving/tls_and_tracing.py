"""`python -m benchmarks.serving.tls_and_tracing`: measures the cost of checksums, TLS and tracing in one run.

KV transfers: one engine writes to another over loopback TCP: plain, with checksums, with TLS, and with both. Cluster: a
closed loop of requests with long prompts and short answers against clusters that all run at once and are measured one
at a time: plain, each feature alone, all features. Medians over the rounds, and medians of the ratios to plain.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import interleaved, median, random_prompts, table, write_json
from moonserve.deploy.launcher.local_cluster import LocalCluster, running_cluster
from moonserve.protocol.process.tls import TlsFiles
from moonserve.traces.client import StreamClient
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions

PROMPT_TOKENS, OUTPUT_TOKENS = 768, 16
CONCURRENCY, REQUESTS = 4, 32
VOCAB = 4_000
BLOCK_BYTES, POOL_BYTES, IN_FLIGHT = 1 << 20, 64 << 20, 32
TRANSFER_S = 1.0
PLAIN = "plain"
_MEMORY = ("--dram", "512MiB", "--kv-cache-memory", "128MiB")  # small, so that five clusters fit a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    name: str
    checksums: bool = False
    tls: bool = False
    tracing: bool = False

    def flags(self, files: TlsFiles, traces: Path) -> list[str]:
        """Returns flags of `moonserve serve`. KV goes over TCP so that it can be encrypted."""
        flags = ["--transports", "tcp", "--num-threads", "1", "--store-nodes", "1", *_MEMORY]
        flags.append("--transfer-checksums" if self.checksums else "--no-transfer-checksums")
        if self.tls:
            flags += ["--tls-certificate", str(files.certificate), "--tls-key", str(files.key)]
            flags += ["--tls-authority", str(files.authority)]
        if self.tracing:
            flags += ["--trace-dir", str(traces)]
        return flags


PROTECTIONS = (
    Protection(name=PLAIN),
    Protection(name="checksums of slices", checksums=True),
    Protection(name="TLS", tls=True),
    Protection(name="tracing", tracing=True),
    Protection(name="all", checksums=True, tls=True, tracing=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a claim")
    parser.add_argument("--output", type=Path, default=Path("out/safety.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = certificates(folder)
        moved = transfers(files, arguments.rounds)
        served = asyncio.run(clusters(folder, files, arguments.rounds))
    print(_report("KV over tcp, GB/s", moved, 1e9))
    print(_report("cluster, tokens/s (prompts and answers)", served, 1.0))
    write_json(arguments.output, {"transfers": moved, "cluster": served})
    return 0


def certificates(folder: Path) -> TlsFiles:
    """Creates certificates for the benchmark's clusters with the openssl command."""
    if shutil.which("openssl") is None:
        raise SystemExit("needs openssl")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    authority, authority_key = folder / "authority.pem", folder / "authority.key"
    request, certificate = folder / "member.csr", folder / "member.pem"
    for command in (
        f"req -x509 {key} -days 2 -subj /CN=cluster -keyout {authority_key} -out {authority}",
        f"req {key} -subj /CN=member -addext subjectAltName=IP:127.0.0.1 -keyout {folder}/member.key -out {request}",
        f"x509 -req -in {request} -CA {authority} -CAkey {authority_key} -copy_extensions copy -days 2 "
        f"-out {certificate}",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    return TlsFiles(certificate, folder / "member.key", authority)


def transfers(files: TlsFiles, rounds: int) -> dict[str, list[float]]:
    """Returns bytes per second of writes between two engines in this process, by side and round."""
    sides = {side.name: side for side in PROTECTIONS if not side.tracing}
    sides["both"] = Protection(name="both", checksums=True, tls=True)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for name, _ in interleaved(list(sides), [None], rounds):
        rates[name].append(_write_rate(_options(sides[name], files)))
    return rates


def _options(side: Protection, files: TlsFiles) -> TransferOptions:
    tls = files if side.tls else None
    return TransferOptions(transports=("tcp",), checksums=side.checksums, tls=tls)


def _write_rate(options: TransferOptions) -> float:
    with (
        TransferEngine(cluster_token="safety", options=options) as near,
        TransferEngine(cluster_token="safety", options=options) as far,
    ):
        source, target = near.allocate(POOL_BYTES), far.allocate(POOL_BYTES)
        window = far.open_window(target, [(0, POOL_BYTES)])
        remote = RemoteSegment(far.address, target.segment_id)
        batch = [
            Transfer(Op.WRITE, source, offset, remote, offset, BLOCK_BYTES, window)
            for offset in range(0, IN_FLIGHT * BLOCK_BYTES, BLOCK_BYTES)
        ]
        near.submit(batch, deadline_s=60).wait()  # opens connections and touches pages
        began_at, moved = time.perf_counter(), 0
        while time.perf_counter() - began_at < TRANSFER_S:
            near.submit(batch, deadline_s=60).wait()
            moved += IN_FLIGHT * BLOCK_BYTES
        return moved / (time.perf_counter() - began_at)


async def clusters(folder: Path, files: TlsFiles, rounds: int) -> dict[str, list[float]]:
    """Returns tokens per second by side and round, without a warm-up round."""
    rates: dict[str, list[float]] = {side.name: [] for side in PROTECTIONS}
    with _all_running(folder, files) as standing:
        for name, _ in interleaved(list(standing), [None], rounds + 1):
            seed = f"{name} {len(rates[name])}"
            rates[name].append(await _served_rate(standing[name].url, seed))
    return {name: own[1:] for name, own in rates.items()}


@contextlib.contextmanager
def _all_running(folder: Path, files: TlsFiles) -> Iterator[Mapping[str, LocalCluster]]:
    with contextlib.ExitStack() as stack:
        yield {
            side.name: stack.enter_context(
                running_cluster(
                    None,
                    *side.flags(files, folder / "traces"),
                    log_dir=folder / side.name.replace(" ", "-"),
                    environ={"MOONSERVE_CLUSTER_TOKEN": os.urandom(8).hex()},
                )
            )
            for side in PROTECTIONS
        }


async def _served_rate(url: str, seed: str) -> float:
    """Returns tokens per second of a closed loop with new prompts."""
    prompts = random_prompts(REQUESTS, PROMPT_TOKENS, VOCAB, seed)
    async with StreamClient(url) as client:
        model = (await client.model(None)).name

        async def ask_in_turn(share: Sequence[list[int]]) -> None:
            for prompt in share:
                outcome = await client.complete(model, prompt, max_tokens=OUTPUT_TOKENS)
                if outcome.timeline is None:
                    raise RuntimeError(f"a request failed: {outcome.status} {outcome.error}")

        began_at = time.perf_counter()
        await asyncio.gather(*(ask_in_turn(prompts[i::CONCURRENCY]) for i in range(CONCURRENCY)))
        seconds = time.perf_counter() - began_at
    return REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS) / seconds


def _report(title: str, rates: Mapping[str, Sequence[float]], unit: float) -> str:
    rows: list[list[Any]] = []
    for name, values in rates.items():
        ratio = median([v / plain for v, plain in zip(values, rates[PLAIN], strict=True)])
        found = median(values) / unit
        rows.append([name, f"{found:,.2f}" if found < 100 else f"{found:,.0f}", f"{ratio:.2f}"])
    return f"\n{title}\n\n" + table(["on", "median", "of plain"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
