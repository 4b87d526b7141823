"""`moonserve kvctl` as a process of its own that waits for who is slow."""

from __future__ import annotations

import sys

from deploy.cli import main
from deploy.kvctl import cluster
from protocol.registry import remote
from tests.channels import PatientChannels

if __name__ == "__main__":
    cluster.Channels = remote.Channels = PatientChannels
    sys.exit(main(["kvctl", *sys.argv[1:]]))
