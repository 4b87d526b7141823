"""Imports point in one direction (ARCHITECTURE.md, code map), in no circle; what decides is pure; few know the time."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from moonserve.__main__ import SERVERS, VERBS

ROOT = Path(__file__).parent.parent

ALLOWED = {
    "protocol": set(),
    "transfer": {"protocol"},
    "kvstore": {"protocol", "transfer"},
    "engine": {"protocol"},
    "conductor": {"protocol", "kvstore.directory"},
    "worker": {"protocol", "engine", "transfer", "kvstore"},
    "prefill_worker": {"protocol", "engine", "transfer", "kvstore", "worker"},
    "decode_worker": {"protocol", "engine", "transfer", "kvstore", "worker"},
    "gateway": {"protocol"},
    "traces": {
        "protocol",
        # The pure parts, which the simulator drives in virtual time.
        *(f"conductor.{part}" for part in ("state", "events", "placement", "prediction", "role_switching")),
        *(f"kvstore.{part}" for part in ("state", "disk.base", "published_index")),
    },
    "models": set(),
    "vllm": {"protocol", "transfer", "kvstore"},
}
SHIPPED = {*ALLOWED, "deploy"} - {"vllm"}  # `import vllm` is vLLM; this package lies in moonserve/
PACKAGES = {*SHIPPED, "benchmarks", "tests"}

# More than their package may: the former combine both roles of a worker, the latter are workers.
BOTH_ROLES = ("decode_worker/local_prefill/", "decode_worker/role_switching.py")
VLLM_WORKERS = ("moonserve/vllm/serving/", "moonserve/vllm/attached/")

# These decide, like every `*state.py`. Waiting, reading clocks and drawing random numbers belong to their shells.
PURE_PACKAGES = ("prefill_worker/decisions", "decode_worker/decisions", "kvstore/state")
IMPURE = {"asyncio", "socket", "time", "random", "secrets", "torch", "grpc", "threading", "os"}
SERVING = {"fastapi", "starlette", "uvicorn"}


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Returns `package.module` of each import and `package.module.name` of each imported name, in functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def sources(package: str) -> list[Path]:
    folder = ROOT / ("moonserve/vllm" if package == "vllm" else package)
    return [p for p in folder.rglob("*.py") if "pb" not in p.parts]


def name_of(path: Path) -> str:
    """Returns the name under which the module is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    prefix = ("moonserve",) if parts[0] in SHIPPED else ()
    return ".".join(prefix + parts).removesuffix(".__init__")


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_its_layer_allows(package: str) -> None:
    for path in sources(package):
        place = path.relative_to(ROOT).as_posix()
        permitted = {package, *ALLOWED[package]} | ({"prefill_worker"} if place.startswith(BOTH_ROLES) else set())
        permitted |= {"worker", "engine"} if place.startswith(VLLM_WORKERS) else set()
        for name in imports_of(path):
            top = name.removeprefix("moonserve.").split(".")[0]
            if top in PACKAGES or is_in(name, "moonserve.vllm"):
                assert any(is_in(name, f"moonserve.{each}") for each in permitted), f"{place} imports {name}"


def test_a_package_is_imported_as_part_of_moonserve() -> None:
    """`import kvstore` works in a checkout, and makes a second copy of each module, but not where a wheel is installed.
    Code in strings is checked too."""
    named = "|".join(SHIPPED)
    bare = re.compile(rf"\bfrom ({named})(\.\w+)* import\b|(^|[;\"'])\s*import ({named})\b", re.MULTILINE)
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [f"{file}: {match[0]}" for file in files.splitlines() for match in bare.finditer((ROOT / file).read_text())]
    assert not found


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports in functions and for types count. `from package import module` is an import of the module only."""
    modules = {name_of(path): path for package in {*SHIPPED, "vllm", "benchmarks"} for path in sources(package)}
    graph: dict[str, set[str]] = {}
    for importer, path in modules.items():
        names = {name if name in modules else name.rpartition(".")[0] for name in imports_of(path)}
        graph[importer] = names & modules.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("unwanted", "allowed_in"),
    [({"torch"}, {"engine", "tests", "benchmarks"}), (SERVING, {"gateway", "tests"})],
    ids=["torch", "serving of HTTP"],
)
def test_a_library_is_imported_only_where_it_belongs(unwanted: set[str], allowed_in: set[str]) -> None:
    for path in (path for package in PACKAGES - allowed_in for path in sources(package)):
        assert not {m.split(".")[0] for m in imports_of(path)} & unwanted, path


def test_modules_that_decide_are_pure() -> None:
    files = [path for package in {*SHIPPED, "vllm"} for path in sources(package) if path.match("*state.py")]
    files += [path for package in PURE_PACKAGES for path in sources(package)]
    assert all(sources(package) for package in PURE_PACKAGES)
    for path in files:
        assert not {name for name in imports_of(path) if name.split(".")[0] in IMPURE}, path


def test_the_proto_folder_is_no_python_package() -> None:
    """The folder `proto` has no Python files: proto-plus, which ray[default] installs, is imported as `proto`."""
    assert not list((ROOT / "proto").glob("*.py"))


def test_processes_that_compute_nothing_import_neither_torch_nor_redis() -> None:
    """Processes that compute nothing import neither torch nor redis at start; that would take longer than all else."""
    own = ("gateway", "conductor", "store", "directory")
    places = ["moonserve.__main__", VERBS["serve"][0], *(place for verb in own for place in SERVERS[verb])]
    imports = "; ".join(f"import {place.partition(':')[0]}" for place in places)
    unwanted = "torch transformers redis matplotlib"
    show = f"import sys; print(*sorted(set('{unwanted}'.split()) & set(sys.modules)))"
    command = [sys.executable, "-c", f"{imports}; {show}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


# A jump of the wall clock ends no lease or membership and ages no value: only this code reads the wall clock, so often.
WALL_CLOCK = {
    "kvstore/node/removal_store.py": 1,  # a node's absence, if the time since boot does not tell
    "protocol/membership/heartbeats.py": 1,  # epochs of members of a conductor's cluster
    "protocol/membership/kv_event_publisher.py": 1,  # the time of a batch in vLLM's format
    "protocol/membership/registry/embedded.py": 1,  # epochs of an embedded registry's lives
    "protocol/process/logs.py": 1,
    "protocol/process/tracing.py": 1,
}
_WALL = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}


@pytest.mark.parametrize("package", ["kvstore", "protocol", "transfer"])
def test_only_listed_code_reads_the_wall_clock(package: str) -> None:
    """Leases, generations and memberships use monotonic clocks and counts, except for `WALL_CLOCK` calls."""
    found: dict[str, int] = {}
    for path in (ROOT / package).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                asks = node.value.id in {"time", "datetime"} and node.attr in _WALL
                found[name] = found.get(name, 0) + asks
            if isinstance(node, ast.ImportFrom) and node.module in {"time", "datetime"}:
                names = {alias.name for alias in node.names}
                assert not names & {*_WALL, "datetime"}, f"{name} may ask for the wall clock"
    asking = {name: n for name, n in found.items() if n}
    assert asking == {name: n for name, n in WALL_CLOCK.items() if name.startswith(package)}
