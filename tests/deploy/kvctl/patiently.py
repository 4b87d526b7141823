"""Runs `moonserve kvctl` as a separate process with long RPC timeouts, for tests on a busy machine."""

from __future__ import annotations

import sys

from deploy.kvctl import cluster
from moonserve.__main__ import main
from protocol.registry import remote
from tests.channels import PatientChannels

if __name__ == "__main__":
    cluster.Channels = remote.Channels = PatientChannels
    sys.exit(main(["kvctl", *sys.argv[1:]]))
