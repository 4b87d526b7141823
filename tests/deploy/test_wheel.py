"""Tests that a wheel contains the compiled library of every package, for installations without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from tests.compilers import need_compiler
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.relative_to(ROOT) for path in ROOT.glob("*/native/*.c"))

LOADING = """
import sys
from pathlib import Path
import protocol.native as native

folder, *sources = sys.argv[1:]
assert Path(native.__file__).is_relative_to(folder), native.__file__
for source in sources:
    native.load_library(Path(folder) / source, native.C_FLAGS, None)

from kvstore.native.prototypes import metadata_library
from transfer.native import data_plane
metadata_library()
assert data_plane()
"""


def run(*command: str | Path, path: str | None = None, cache: Path | None = None) -> None:
    environ = os.environ | ({} if path is None else {"PATH": path})
    environ |= {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        list(map(str, command)), env=environ, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def build(folder: Path, *, path: str | None = None) -> Path:
    """Builds a wheel from a copy of the tree, since the build writes into its source folder."""
    copy = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if not name.startswith(("tests/", "docs/", "benchmarks/")) and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder / "dist")
    run(sys.executable, "-m", "pip", "wheel", *options, copy, path=path)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_every_library_of_an_installed_wheel_loads_without_a_compiler(tmp_path: Path) -> None:
    """The libraries load in a virtual environment that has only the wheel and this environment's dependencies."""
    need_compiler()
    venv, python = tmp_path / "venv", tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", venv)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    others = {path for path in sys.path if path.endswith("site-packages")}
    (site / "dependencies.pth").write_text("\n".join(sorted(others)))
    pip = (python, "-m", "pip", "install", "--no-deps", "--no-index")
    run(*pip, "--ignore-installed", build(tmp_path))
    run(python, "-c", LOADING, site, *SOURCES, path="", cache=tmp_path / "cache")


def test_a_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    """A wheel built without a compiler has the C sources, which are compiled at the first start."""
    names = zipfile.ZipFile(build(tmp_path, path="")).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert {str(source) for source in SOURCES} <= set(names)
