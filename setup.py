"""Installs the top-level folders as packages of `moonserve`, and compiles their portable C sources into the wheel.

Without a compiler the wheel is built all the same; the sources are then compiled on first use
(`moonserve.protocol.process.native_libraries`). So they are in a checkout: an editable install compiles nothing.
"""

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
FOLDERS = (
    "conductor", "decode_worker", "deploy", "engine", "gateway", "kvstore", "models", "prefill_worker", "protocol",
    "traces", "transfer", "worker",
)  # fmt: skip
sys.path.insert(0, str(ROOT))

from moonserve.protocol.process.native_libraries import (  # noqa: E402
    C_FLAGS,
    CompilerError,
    compile_library,
    packaged_library,
)

SOURCES = {
    ".".join(("moonserve", *source.with_suffix("").parts)): source
    for folder in FOLDERS
    for source in sorted(path.relative_to(ROOT) for path in (ROOT / folder).glob("**/native/*.c"))
}


class BuildLibraries(build_ext):
    """Shared libraries beside their sources: no Python modules, so
    `moonserve.protocol.process.native_libraries` names and compiles them."""

    def run(self) -> None:
        if self.editable_mode:  # a library of an older source would stay in the checkout
            self.extensions = []
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        name = next(name for name in SOURCES if f".{name}".endswith(f".{fullname}"))
        library = packaged_library(ROOT / SOURCES[name], C_FLAGS)
        return str(Path(*fullname.split(".")).with_name(library.name))

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        try:
            compile_library(ROOT / ext.sources[0], C_FLAGS, library)
        except CompilerError as error:
            raise CompileError(str(error)) from error


setup(
    packages=[
        *find_packages(include=["moonserve", "moonserve.*"]),
        *(f"moonserve.{name}" for name in find_packages(include=[f"{folder}*" for folder in FOLDERS])),
    ],
    package_dir={"moonserve": "moonserve"} | {f"moonserve.{folder}": folder for folder in FOLDERS},
    ext_modules=[Extension(name, [str(source)], optional=True) for name, source in SOURCES.items()],
    cmdclass={"build_ext": BuildLibraries},
)
