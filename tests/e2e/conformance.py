"""A live cluster against its own `/openapi.json`: `python -m tests.e2e.conformance --seconds 300` (make conformance).

schemathesis makes requests that the document allows and requests that it forbids, and compares every reply with what
the document says. Any 5xx, any status, content type or body that is not described, and any forbidden request that is
accepted fails it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.cluster import UNHURRIED, small_cluster

# A small model with a short context, so that generation is short.
CONTEXT = 128
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "unsupported_method"),
)
# These endpoints stream events until the client disconnects.
_SKIPPED = ("/dashboard/events",)


def run(url: str, *limits: str) -> int:
    """Runs schemathesis, which prints its findings, and returns its exit code. `limits`: its flags for the effort."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--seed", "1", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all", "--warnings", "off", *limits]
    for path in _SKIPPED:
        command += ["--exclude-path", path]
    with tempfile.TemporaryDirectory() as folder:  # schemathesis keeps examples in its working directory
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, cwd=folder, env=environ, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--url", help="a server that runs already; otherwise one is started")
    args = parser.parse_args()
    limits = ("--max-time", str(args.seconds), "--continue-on-failure")
    if args.url:
        return run(args.url, *limits)
    with tempfile.TemporaryDirectory() as folder, small_cluster(Path(folder), *UNHURRIED, context=CONTEXT) as cluster:
        code = run(cluster.url, *limits)
        assert not cluster.tracebacks(), cluster.logs()
        return code


if __name__ == "__main__":
    sys.exit(main())
