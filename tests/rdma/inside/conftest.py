"""Configuration of the verbs tests. They run only in the guest, since they take network interfaces down.

tests/rdma/test_guest.py runs them there.
"""

import multiprocessing
import os
from multiprocessing import forkserver

IN_GUEST = "MOONSERVE_GUEST" in os.environ

collect_ignore_glob = [] if IN_GUEST else ["test_*.py"]

if IN_GUEST:  # the fork server imports the peers' modules while this process does its own imports
    multiprocessing.set_forkserver_preload(["tests.transfer.peer_process"])
    forkserver.ensure_running()
