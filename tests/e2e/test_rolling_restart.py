"""With one process of each kind, all are replaced under continuous requests and none fails."""

import re
import signal

import psutil

from tests.e2e.cluster import UNHURRIED, Cluster, prompt_of
from tests.e2e.load import Regulars
from tests.patience import PATIENCE_S

FLAGS = (*UNHURRIED, "--worker-patience-s", str(PATIENCE_S), "--kv-cache-memory", "32MiB")
CONTEXT = 4_096
ANSWER, LONG = 12, 1_500  # tokens


def test_every_process_is_replaced_under_load_and_no_request_fails(cluster: Cluster) -> None:
    before = cluster.pids()
    epochs = {each["instance_id"]: each["epoch"] for each in cluster.instances()}
    prompts = [prompt_of(f"rolling {number}", 40) for number in range(3)]
    with Regulars(cluster, prompts, ANSWER, num_streamed=LONG) as clients:
        cluster.process.send_signal(signal.SIGUSR1)
        ends = re.compile("every process was restarted|the rolling restart ended early")
        cluster.wait_for("the end", lambda: ends.search(cluster.output) is not None, 3 * PATIENCE_S)
    assert "every process was restarted" in cluster.output
    assert clients.begun_and_done
    after = cluster.pids()
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    cluster.wait_for("all members", lambda: all(cluster.epoch(name) > epoch for name, epoch in epochs.items()))
    cluster.wait_for("the old gateway's end", lambda: not psutil.pid_exists(before["gateway-0"]))
