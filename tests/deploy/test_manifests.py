"""What `deploy/` ships for other programs: each file is read and checked, by the program itself where it is there, and
what the files say of each other and of moonserve is true."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from conductor.config import ConductorConfig
from deploy.config import ServeConfig
from deploy.ray.config import load_cluster, parse_cluster
from protocol.config import options_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SCHEMA = Path(__file__).parent / "kuberay.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
CLUSTERS = [
    *(DEPLOY / "clusters" / name for name in ("small.yaml", "gpu.yaml")),
    KUBERNETES / "cluster.yaml",
]
BIN = "/opt/moonserve/bin/"


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(KUBERNETES.glob("*.yaml")):
        if path.name not in ("cluster.yaml", "kustomization.yaml"):
            for document in yaml.safe_load_all(path.read_text()):
                yield f"{path.name}-{document['kind']}", document


def check(document: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    schema = yaml.safe_load(SCHEMA.read_text())
    assert document["kind"] in schema["$defs"], "the schema does not know it"
    jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{document['kind']}"}).validate(
        document
    )


@pytest.mark.parametrize(
    ("name", "document"),
    list(manifests()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_manifest_is_as_the_api_wants_it(name: str, document: dict[str, Any]) -> None:
    check(document)


def test_the_schema_finds_what_is_misspelt_or_missing() -> None:
    [cluster] = [d for _, d in manifests() if d["kind"] == "RayCluster"]
    misspelt = json.loads(json.dumps(cluster))
    misspelt["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    missing = json.loads(json.dumps(cluster))
    del missing["spec"]["headGroupSpec"]["template"]
    numbers = json.loads(json.dumps(cluster))
    numbers["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 4
    for wrong in (misspelt, missing, numbers):
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def groups(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in spec["workerGroupSpecs"]}


def test_pods_have_what_the_cluster_on_them_asks_for() -> None:
    """Resources, and as many pods as there are workers at most."""
    [ray] = [d["spec"] for _, d in manifests() if d["kind"] == "RayCluster"]
    cluster = load_cluster(KUBERNETES / "cluster.yaml")
    assert ray["rayVersion"] == pinned("ray")
    for name, share, most in (
        ("prefill", cluster.prefill, cluster.prefill.most),
        ("decode", cluster.decode, cluster.decode.most),
        ("gateway", cluster.gateways, cluster.gateways.count),
    ):
        group = groups(ray)[name]
        # KubeRay puts the value on a shell's command line, so it is quoted once more.
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert offered == share.resources
        [container] = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert float(limits["cpu"]) >= share.cpus
        assert float(limits.get("nvidia.com/gpu", 0)) >= share.gpus
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["maxReplicas"] >= most
        grace_s = group["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        assert name == "gateway" or grace_s > cluster.drain_s
    [service] = [d for n, d in manifests() if n.startswith("service.yaml")]
    assert service["spec"]["selector"]["ray.io/group"] in groups(ray)
    assert service["spec"]["ports"][0]["targetPort"] == cluster.serve.port


def test_the_service_has_the_clusters_pods_and_deploys_the_same() -> None:
    """But for the file, which is the application's arguments there."""
    [service] = [d["spec"] for _, d in manifests() if d["kind"] == "RayService"]
    [cluster] = [d["spec"] for _, d in manifests() if d["kind"] == "RayCluster"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    del head["volumes"]
    del head["containers"][0]["volumeMounts"]
    assert service["rayClusterConfig"] == cluster
    serve = yaml.safe_load(service["serveConfigV2"])
    assert parse_cluster(serve) == load_cluster(KUBERNETES / "cluster.yaml")
    [application] = serve["applications"]
    module, _, function = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert serve["http_options"]["port"] != parse_cluster(serve).serve.port


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_a_cluster_that_is_shipped_can_be_deployed(path: Path) -> None:
    config = load_cluster(path)
    assert config.namespace.startswith("moonserve-")


def test_kustomize_builds_the_whole() -> None:
    binary = shutil.which("kubectl")
    if binary is None:
        pytest.skip("needs kubectl")
    built = subprocess.run(
        [binary, "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    documents = list(yaml.safe_load_all(built.stdout))
    [held] = [d for d in documents if d["kind"] == "ConfigMap"]
    assert yaml.safe_load(held["data"]["cluster.yaml"])["name"] == "chat"
    [ray] = [d for d in documents if d["kind"] == "RayCluster"]
    [volume] = ray["spec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    assert ray["metadata"]["namespace"] == held["metadata"]["namespace"] == "moonserve"
    assert volume["configMap"]["name"].startswith("moonserve-cluster")


def test_the_launchers_file_is_as_ray_wants_it() -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from ray.autoscaler._private.util import fillout_defaults, prepare_config, validate_config

    document = yaml.safe_load((DEPLOY / "clusters" / "ray-up.yaml").read_text())
    validate_config(fillout_defaults(prepare_config(document)))
    assert all("--disable-usage-stats" in commands[-1] for commands in started(document))


def started(document: dict[str, Any]) -> list[list[str]]:
    return [document["head_start_ray_commands"], document["worker_start_ray_commands"]]


# -- docker


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_is_there_and_all_that_the_package_has(path: Path) -> None:
    lines = path.read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    known = {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ENV",
        "USER",
        "EXPOSE",
        "ENTRYPOINT",
        "CMD",
        "HEALTHCHECK",
    }
    assert {word for word, _ in instructions} <= known
    assert instructions[0][0] == "FROM"
    copied: set[str] = set()
    for word, rest in instructions:
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
            copied |= set(sources)
        if word in ("ENTRYPOINT", "CMD"):
            assert json.loads(rest)
    packaged = (ROOT / "pyproject.toml").read_text().split("include = [")[1].split("]")[0]
    assert set(re.findall(r'"(\w+)\*"', packaged)) <= copied


@pytest.mark.parametrize("name", ["docker-compose.yaml", "redis-sentinel.yaml"])
def test_compose_mounts_and_names_what_is_there(name: str) -> None:
    document = yaml.safe_load((DEPLOY / "docker" / name).read_text())
    services = document["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / "docker" / source).exists(), source
        assert set(service.get("depends_on", ())) <= set(services)
        network = service.get("network_mode", "host")
        assert network == "host" or network.removeprefix("service:") in services
        built = service.get("build")
        if built is not None:
            assert (DEPLOY / "docker" / built["context"] / built["dockerfile"]).exists()


def test_composes_command_is_one_that_serve_takes() -> None:
    document = yaml.safe_load((DEPLOY / "docker" / "docker-compose.yaml").read_text())
    words = document["services"]["moonserve"]["command"].split()
    flags = {option.flag for option in options_of(ServeConfig)}
    assert {word for word in words if word.startswith("--")} <= flags


# -- systemd


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_a_unit(path: Path, tmp_path: Path) -> None:
    """As it is, but for programs that are not installed here."""
    binary = shutil.which("systemd-analyze")
    if binary is None:
        pytest.skip("needs systemd-analyze")
    for unit in UNITS:
        text = unit.read_text()
        (tmp_path / unit.name).write_text(re.sub(rf"{BIN}\w+", "/bin/true", text))
    checked = tmp_path / path.name.replace("@", "@prefill")
    told = subprocess.run(
        [binary, "verify", "--man=no", str(checked)], capture_output=True, text=True, check=False
    )
    ours = [line for line in told.stderr.splitlines() if "moonserve" in line]
    assert ours == []


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_there_is(path: Path) -> None:
    from deploy.cli import VERBS

    [command] = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
    program, verb, *flags = command.removeprefix(BIN).split()
    if program == "moonserve":
        assert verb in VERBS
        assert "--config" in flags
    else:
        assert (program, verb) == ("ray", "start")
        assert "--disable-usage-stats" in flags


def test_a_conductors_file_can_say_that_it_stands_by() -> None:
    """As the unit's comment says."""
    assert {"registry", "host", "port"} <= {option.name for option in options_of(ConductorConfig)}


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    [version] = [
        line.removeprefix(f"{package}==") for line in lines if line.startswith(f"{package}==")
    ]
    return version
