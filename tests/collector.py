"""A real OpenTelemetry collector (rotel) for tests. It passes spans on to a receiver in the test's own process."""

import contextlib
import gzip
import http.server
import importlib.util
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from moonserve.deploy.launcher.ports import free_port
from tests.patience import PATIENCE_S


def attributes_of(message: Span | Resource) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in message.attributes}


class Receiver(http.server.BaseHTTPRequestHandler):
    """Receives spans over OTLP/HTTP."""

    spans: list[tuple[str, Span]]  # with the ids of the processes that made them

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["content-length"]))
        plain = gzip.decompress(sent) if self.headers.get("content-encoding") == "gzip" else sent
        for each in ExportTraceServiceRequest.FromString(plain).resource_spans:
            process = attributes_of(each.resource)["service.instance.id"]
            self.spans += [(process, span) for scope in each.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@contextlib.contextmanager
def running_collector(folder: Path) -> Iterator[str]:
    """Yields the endpoint of a collector. What it passes on is in `Receiver.spans`. `folder`: for its log. Where rotel
    has no wheel, the receiver stands alone."""
    Receiver.spans = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        url, found = f"http://127.0.0.1:{server.server_port}", importlib.util.find_spec("rotel")
        if found is not None and found.origin is not None:
            own, other = (f"127.0.0.1:{free_port()}" for _ in range(2))
            command = [str(Path(found.origin).with_name("rotel-agent")), "start", "--otlp-http-endpoint", own]
            command += ["--otlp-grpc-endpoint", other, "--exporter", "otlp", "--otlp-exporter-protocol", "http"]
            log = stack.enter_context((folder / "rotel.log").open("wb"))
            process = subprocess.Popen([*command, "--otlp-exporter-endpoint", url], stdout=log, stderr=log)
            stack.callback(process.wait, PATIENCE_S)
            stack.callback(process.terminate)
            url = f"http://{own}"
        yield f"{url}/v1/traces"
