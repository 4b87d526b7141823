"""Tests of the files in `deploy/` for other programs: each is valid, for the program itself where it is installed, and
agrees with the other files and with moonserve."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from moonserve.__main__ import VERBS
from moonserve.conductor.config import ConductorConfig
from moonserve.deploy.launcher.config import ServeConfig
from moonserve.deploy.ray.config import load_cluster
from moonserve.protocol.process.config import options_of
from tests.processes import binary

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "kubernetes"
RENDERED = Path(__file__).parent / "chart"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
DOCKER = DEPLOY / "docker"
KUBERAY = yaml.safe_load((Path(__file__).parent / "kuberay.yaml").read_text())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
KUBERNETES_VERSION = "1.34"
BIN = "/opt/moonserve/bin/"
MANIFESTS: list[dict[str, Any]] = [
    document for path in sorted(RENDERED.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())
]


@pytest.mark.skipif(HELM is None, reason="needs helm")
@pytest.mark.parametrize("kind", ["raycluster", "rayservice"])
def test_the_chart_passes_lint_and_renders_these_manifests(kind: str) -> None:
    """After a change of the chart, `helm template` writes them anew."""
    chosen = ["--namespace", "moonserve", "--set", f"rayService={str(kind == 'rayservice').lower()}"]
    subprocess.run([str(HELM), "lint", "--strict", "--quiet", str(CHART), *chosen], check=True)
    template = [str(HELM), "template", "moonserve", str(CHART), *chosen]
    rendered = subprocess.run(template, capture_output=True, text=True, check=True).stdout
    assert rendered == (RENDERED / f"{kind}.yaml").read_text()


def test_manifests_match_the_api_schema_and_clusters_parse() -> None:
    for document in MANIFESTS:
        if document["apiVersion"] != "ray.io/v1":
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
            continue
        jsonschema.Draft202012Validator({**KUBERAY, "$ref": f"#/$defs/{document['kind']}"}).validate(document)
        cluster = document["spec"].get("rayClusterConfig", document["spec"])
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
    for name in ("small.yaml", "gpu.yaml"):
        assert load_cluster(DEPLOY / "clusters" / name).namespace.startswith("moonserve-")


def test_pods_have_the_resources_that_the_cluster_requests(tmp_path: Path) -> None:
    """Each pod group has the resources of its workers, and as many pods as there can be workers."""
    [ray] = [document["spec"] for document in MANIFESTS if document["kind"] == "RayCluster"]
    [described] = [document["data"] for document in MANIFESTS if document["kind"] == "ConfigMap"]
    (tmp_path / "cluster.yaml").write_text(described["cluster.yaml"])
    cluster = load_cluster(tmp_path / "cluster.yaml")
    groups = {group["groupName"]: group for group in ray["workerGroupSpecs"]}
    assert f"ray=={ray['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    for name, share, most in (
        ("prefill", cluster.prefill, cluster.prefill.most),
        ("decode", cluster.decode, cluster.decode.most),
        ("gateway", cluster.gateways, cluster.gateways.count),
    ):
        group, pod = groups[name], groups[name]["template"]["spec"]
        # KubeRay inserts the value in a shell command line, so it is quoted twice.
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == share.resources
        limits = pod["containers"][0]["resources"]["limits"]
        assert float(limits["cpu"]) >= share.cpus
        assert float(limits.get("nvidia.com/gpu", 0)) >= share.gpus
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["maxReplicas"] >= most
        grace_s = pod.get("terminationGracePeriodSeconds", 30)
        assert name == "gateway" or grace_s > cluster.drain_s
    service, _ = [
        each["spec"] for each in MANIFESTS if each["kind"] == "Service" and "ray.io/group" in each["spec"]["selector"]
    ]
    assert service["selector"]["ray.io/group"] in groups
    assert service["ports"][0]["port"] == cluster.serve.port


def test_ray_accepts_the_launcher_file() -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from ray.autoscaler._private.util import fillout_defaults, prepare_config, validate_config

    document = yaml.safe_load((DEPLOY / "clusters" / "ray-up.yaml").read_text())
    validate_config(fillout_defaults(prepare_config(document)))
    for part in ("head", "worker"):
        assert "--disable-usage-stats" in document[f"{part}_start_ray_commands"][-1]


@pytest.mark.parametrize("path", sorted(DOCKER.glob("Dockerfile*")), ids=lambda path: path.name)
def test_a_dockerfile_copies_existing_files_and_every_package(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert next(word for word, _ in instructions if word != "ARG") == "FROM"
    copied: set[str] = set()
    for word, rest in instructions:
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            copied.update(os.listdir(ROOT) if "." in sources else sources)
        if word in ("ENTRYPOINT", "CMD"):
            assert json.loads(rest)
    packaged = (ROOT / "setup.py").read_text().split("FOLDERS = (")[1].split(")")[0]
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert {"pyproject.toml", "setup.py", "moonserve", *re.findall(r'"(\w+)"', packaged)} <= copied - ignored


@pytest.mark.parametrize("name", ["docker-compose.yaml", "redis-sentinel.yaml"])
def test_compose_files_name_existing_files_services_and_flags(name: str) -> None:
    services = yaml.safe_load((DOCKER / name).read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert (DOCKER / volume.split(":")[0]).exists(), volume
        assert set(service.get("depends_on", ())) <= set(services)
        network = service.get("network_mode", "host")
        assert network == "host" or network.removeprefix("service:") in services
        if (built := service.get("build")) is not None:
            assert (DOCKER / built["context"] / built["dockerfile"]).exists()
    flags = {option.flag for option in options_of(ServeConfig)}
    words = services.get("moonserve", {}).get("command", "").split()
    assert {word for word in words if word.startswith("--")} <= flags


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_an_existing_command_and_systemd_accepts_it(path: Path, tmp_path: Path) -> None:
    """A unit starts an existing verb, and systemd accepts it; programs are replaced, since they are not installed."""
    [command] = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
    program, verb, *flags = command.removeprefix(BIN).split()
    if program == "moonserve":
        assert verb in VERBS
        assert "--config" in flags
    else:
        assert (program, verb) == ("ray", "start")
        assert "--disable-usage-stats" in flags
    # A conductor's file can configure a standby, as the unit's comment says.
    assert {"registry", "host", "port"} <= {option.name for option in options_of(ConductorConfig)}
    analyze = binary("systemd-analyze")
    for unit in UNITS:
        (tmp_path / unit.name).write_text(re.sub(rf"{BIN}\w+", "/bin/true", unit.read_text()))
    checked = tmp_path / path.name.replace("@", "@prefill")
    told = subprocess.run([analyze, "verify", "--man=no", str(checked)], capture_output=True, text=True, check=False)
    assert [line for line in told.stderr.splitlines() if "moonserve" in line] == []
