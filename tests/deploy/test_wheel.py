"""Tests that a wheel has every module as `moonserve.…`, and the compiled libraries for machines without a compiler."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

from tests.compilers import need_compiler
from tests.patience import PATIENCE_S
from tests.test_layering import SHIPPED

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.relative_to(ROOT) for name in SHIPPED for path in (ROOT / name).glob("**/native/*.c"))

LOADING = """
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from moonserve.__main__ import SERVERS, TRACES_VERBS, VERBS
import moonserve.protocol.process.native_libraries as native

folder, *sources = sys.argv[1:]
assert Path(native.__file__).is_relative_to(folder), native.__file__
for source in sources:
    native.load_library(Path(folder) / "moonserve" / source, native.C_FLAGS, None)

from moonserve.kvstore.published_index import index_library
from moonserve.transfer.memory.data_plane import data_plane
index_library()
assert data_plane()

# A package of another name would come from somewhere else.
assert not [verb for verb in ("conductor", "engine", "gateway", "kvstore", "traces") if find_spec(verb)]
targets = [target for table in (VERBS, TRACES_VERBS, SERVERS) for entry in table.values() for target in entry]
modules = {target.partition(":")[0] for target in targets if target.startswith("moonserve.")}
for module in (each for each in modules if not each.startswith("moonserve.vllm.")):  # they need vLLM
    assert Path(import_module(module).__file__).is_relative_to(folder), module
"""


def run(*command: str | Path, path: str | None = None, cache: Path | None = None) -> None:
    environ = os.environ | ({} if path is None else {"PATH": path})
    environ |= {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        list(map(str, command)), env=environ, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def copy_of_the_tree(folder: Path) -> Path:
    """Copies the shipped files, since a build writes into its source folder. The copy has no Git history."""
    copy = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if not name.startswith(("tests/", "docs/", "benchmarks/")) and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def build(folder: Path, *, path: str | None = None) -> Path:
    """Builds a wheel."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder / "dist")
    run(sys.executable, "-m", "pip", "wheel", *options, copy_of_the_tree(folder), path=path)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_an_installed_wheel_imports_as_moonserve_and_loads_its_libraries_without_a_compiler(tmp_path: Path) -> None:
    """It does in a virtual environment that has only the wheel and this environment's dependencies."""
    need_compiler()
    venv, python = tmp_path / "venv", tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", venv)  # the dependencies have it
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    others = {path for path in sys.path if path.endswith("site-packages")}
    (site / "dependencies.pth").write_text("\n".join(sorted(others)))
    pip = (python, "-m", "pip", "install", "--no-deps", "--no-index")
    run(*pip, "--ignore-installed", build(tmp_path))
    run(python, "-c", LOADING, site, *SOURCES, path="", cache=tmp_path / "cache")
    run(venv / "bin" / "moonserve", "--version")


def test_a_wheel_is_built_without_a_compiler_and_without_git(tmp_path: Path) -> None:
    """Without a compiler it has the C sources, which are compiled at the first start; without Git, the version of
    pyproject.toml."""
    names = zipfile.ZipFile(build(tmp_path, path="")).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert {f"moonserve/{source}" for source in SOURCES} <= set(names)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]
    assert {name.split("/")[0] for name in names} == {"moonserve", f"moonserve-{version}.dist-info"}
    modules = [path.relative_to(ROOT) for package in SHIPPED for path in (ROOT / package).rglob("*.py")]
    assert {f"moonserve/{module}" for module in modules} <= set(names)
