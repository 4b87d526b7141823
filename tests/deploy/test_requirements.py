"""Tests that what other engines' processes import needs only the base requirements of pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

import moonserve.__main__ as command
from tests.commands import Command

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Imports each named module and all below it, in a process where only the modules of the first argument are installed.
IMPORTING = """
import sys
from importlib import import_module
from pkgutil import walk_packages

installed = {*sys.argv[1].split(","), *sys.stdlib_module_names, "moonserve"}

class OnlyInstalled:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in installed:
            raise ModuleNotFoundError(f"{name} is of no base requirement", name=name)

sys.meta_path.insert(0, OnlyInstalled)
for name in sys.argv[2:]:
    for each in walk_packages(getattr(import_module(name), "__path__", ()), f"{name}."):
        import_module(each.name)
"""


def canonical(requirement: str) -> str:
    """Returns the distribution's name, as PyPI compares names."""
    return re.sub("[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def modules_of(requirements: Iterable[str], *, deep: bool) -> set[str]:
    """Returns the modules that the requirements install, with `deep` those of their own requirements too."""
    found, left = set(), list(requirements)
    while left:
        if (name := canonical(left.pop())) not in found:
            found.add(name)
            with suppress(metadata.PackageNotFoundError):  # of another system
                left += [each for each in metadata.requires(name) or () if deep and "extra ==" not in each]
    owners_of_modules = metadata.packages_distributions()
    return {module for module, owners in owners_of_modules.items() if not found.isdisjoint(map(canonical, owners))}


def test_other_engines_processes_and_the_base_verbs_import_only_the_base_requirements() -> None:
    names = [f"moonserve.{package}" for package in ("protocol", "transfer", "kvstore", "conductor")]
    tables = (command.VERBS, command.TRACES_VERBS, command.SERVERS)
    places = [place for table in tables for verb in {*command.BASE_VERBS, "fetch", "analyze", "synthesize"} & {*table}
              for place in table[verb]]  # fmt: skip
    names += [place.partition(":")[0] for place in places if place.startswith("moonserve.")]
    installed = ",".join(modules_of(PROJECT["dependencies"], deep=True))
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, installed, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_other_verbs_are_refused_where_a_module_of_the_extra_serve_is_missing(
    monkeypatch: pytest.MonkeyPatch, moonserve: Command
) -> None:
    extra = [modules_of([each], deep=False) for each in PROJECT["optional-dependencies"]["serve"] if "gguf" not in each]
    assert len(extra) == len(command.SERVE_MODULES)
    assert all(any(module in modules for modules in extra) for module in command.SERVE_MODULES)
    monkeypatch.setattr(command, "SERVE_MODULES", (*command.SERVE_MODULES, "not_installed"))
    for verb in {*command.VERBS} - {*command.BASE_VERBS}:
        assert (
            moonserve(verb, "--help", ends=2).err
            == f"moonserve {verb} needs not_installed: pip install 'moonserve[serve]'\n"
        )
