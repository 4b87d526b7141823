"""Runs `moonserve kvctl` as a separate process with long RPC timeouts, for tests on a busy machine."""

import sys

from moonserve.__main__ import main
from moonserve.deploy.admin import kvctl_cluster
from moonserve.protocol.membership.registry import client as registry_client
from tests.patience import PatientChannels

if __name__ == "__main__":
    kvctl_cluster.Channels = registry_client.Channels = PatientChannels
    sys.exit(main(["kvctl", *sys.argv[1:]]))
