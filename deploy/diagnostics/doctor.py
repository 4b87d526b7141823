"""`moonserve doctor`: checks whether this machine is ready, which transports work, and whether a peer is reachable.

The exit code is 1 if a finding is `fail`: a requested item (`--transports`, `--peer`, `--port`, `--registry`, `--disk`,
rails) or a requirement does not work. The command changes nothing and takes a few seconds.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonserve.deploy.diagnostics import doctor_findings, doctor_machine, doctor_network, doctor_services
from moonserve.deploy.diagnostics.doctor_findings import Finding
from moonserve.protocol.process.config import option, run_command
from moonserve.protocol.process.progress_bars import ProgressBars
from moonserve.transfer.config import TransferConfig

EXIT_PROBLEM = 1


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(TransferConfig):
    """Options of `moonserve doctor`."""

    host: str = option("127.0.0.1", help="address of this machine that its peers would use")
    port: int | None = option(None, help="port that must be free; 8000 is tried, and may be taken, when not given")
    disk: str | None = option(None, help="folder that --ssd would use; the one for logs when not given")
    registry: str | None = option(None, help="registry that must answer: redis://…, redis+sentinel://… or host:port")
    cluster_token: str = option("", help="shared secret, to try a peer's handshake", secret=True)
    peer: str | None = option(None, help="transfer address or host:port of a peer that must be reachable")
    measure: bool = option(True, help="measure how fast disk and transports are")
    json: bool = option(False, help="print JSON")


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code. `argv`: the arguments after `doctor`."""
    return run_command(DoctorConfig, run, argv, prog="moonserve doctor")


def run(config: DoctorConfig) -> int:
    """Examines the machine, prints the findings, and returns the exit code. Raises ConfigError."""
    with ProgressBars(bars=not config.json, lines=False) as progress, progress.busy("examining"):
        report = examine(config)
    if config.json:
        print(json.dumps(doctor_findings.as_json(report), indent=2))
    else:
        print("\n".join(doctor_findings.as_text(report)))
    return EXIT_PROBLEM if doctor_findings.has_failed(report) else 0


def examine(config: DoctorConfig) -> list[Finding]:
    options = config.transfer_options(config.host)
    # The report contains every failure; warnings of the transfer engine would only interrupt it.
    logging.getLogger("transfer").addHandler(logging.NullHandler())
    disk = None if config.disk is None else Path(config.disk)
    report = [
        *doctor_machine.check_software(),
        *doctor_machine.check_machine(),
        doctor_machine.locked_memory(rdma_wanted="rdma" in options.transports),
        *doctor_machine.check_gpus(),
        *doctor_services.check_ports(config.host, config.port),
        doctor_services.check_disk(disk, measure=config.measure),
        doctor_services.check_registry(config.registry, config.cluster_token),
        *doctor_machine.check_rdma(),
        *doctor_network.check_transports(options, measure=config.measure),
        *doctor_network.check_rails(options),
    ]
    if config.peer is not None:
        report += doctor_network.check_peer(config.peer, options, config.cluster_token)
    return report
