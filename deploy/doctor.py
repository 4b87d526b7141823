"""`moonserve doctor`: is this machine ready, over which transports can it move KV, can it reach a peer?

Owns the order of the report and its exit code: 1 when something that was asked for (`--transports`,
`--peer`, rails) does not work, 0 otherwise. Changes nothing, and takes a few seconds.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy import findings, machine_checks, peer_checks, transfer_checks
from deploy.findings import Finding
from protocol.config import HelpRequested, load, option
from protocol.errors import ConfigError
from protocol.process import EXIT_CONFIG
from transfer.config import TransferConfig

EXIT_PROBLEM = 1


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(TransferConfig):
    """Options of `moonserve doctor`."""

    host: str = option("127.0.0.1", help="address of this machine that its peers would use")
    cluster_token: str = option("", help="shared secret, to try a peer's handshake", secret=True)
    peer: str | None = option(
        None, help="transfer address or host:port of a peer that must be reachable"
    )
    measure: bool = option(True, help="measure how fast each transport is here")
    json: bool = option(False, help="print JSON")


def main(argv: Sequence[str]) -> int:
    """`argv`: the arguments after `doctor`."""
    try:
        config = load(DoctorConfig, argv, prog="moonserve doctor", environ=dict(os.environ))
        report, topology = examine(config)
    except HelpRequested as request:
        print(request)
        return 0
    except ConfigError as error:
        print(f"moonserve doctor: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if config.json:
        print(json.dumps({**findings.as_json(report), "topology": topology}, indent=2))
    else:
        print("\n".join(findings.as_text(report)))
    return EXIT_PROBLEM if findings.has_problems(report) else 0


def examine(config: DoctorConfig) -> tuple[list[Finding], dict[str, Any]]:
    """All findings, and the topology matrix in the form that `--transfer-topology` reads."""
    options = config.transfer_options(config.host)
    # What goes wrong is in the report; the engine's own warnings would only be in between.
    logging.getLogger("transfer").addHandler(logging.NullHandler())
    report = [*machine_checks.check_software(), *machine_checks.check_machine()]
    report.append(machine_checks.locked_memory(rdma_wanted="rdma" in options.transports))
    report += transfer_checks.check_transports(options, measure=config.measure)
    rails, topology = transfer_checks.check_rails(options)
    report += rails
    if config.peer is not None:
        report += peer_checks.check_peer(config.peer, options, config.cluster_token)
    return report, topology.as_json() if topology else {}
