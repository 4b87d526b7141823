"""Compiles the packages' portable C sources into the wheel. Everything else is in pyproject.toml.

Without a compiler the wheel is built all the same; the sources are then compiled on first use (`protocol.native`). So
they are in a checkout: an editable install compiles nothing.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from protocol.native import C_FLAGS, CompilerError, compile_library, packaged_library  # noqa: E402

SOURCES = {
    ".".join(source.with_suffix("").parts): source
    for source in sorted(path.relative_to(ROOT) for path in ROOT.glob("*/native/*.c"))
}


class BuildLibraries(build_ext):
    """Shared libraries beside their sources: no Python modules, so `protocol.native` names and compiles them."""

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
    ext_modules=[Extension(name, [str(source)], optional=True) for name, source in SOURCES.items()],
    cmdclass={"build_ext": BuildLibraries},
)
