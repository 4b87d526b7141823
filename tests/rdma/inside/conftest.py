"""Tests of verbs, for the guest only: they take interfaces down, which no host would thank them for.

tests/rdma/test_guest.py runs them there.
"""

import multiprocessing
import os
from multiprocessing import forkserver

IN_GUEST = "MOONSERVE_GUEST" in os.environ

collect_ignore_glob = [] if IN_GUEST else ["test_*.py"]

if IN_GUEST:  # what peers import is imported beside what this process imports
    multiprocessing.set_forkserver_preload(["tests.transfer.peer_process"])
    forkserver.ensure_running()
