"""Provides the guest's kernel and its modules from a Debian kernel package.

Owns their source (installed, or downloaded and unpacked) and the order in which modules are loaded.
Does not know how they are packed or booted.
"""

import lzma
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

WANTED = (
    "virtio_pci",
    "virtio_net",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",  # rxe requests crc32 from the crypto layer by name, so no dependency lists it
    "crc32_pclmul",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)
_RXE = "drivers/infiniband/sw/rxe"
_SUFFIXES = (".ko", ".ko.xz")
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


class GuestUnavailable(Exception):
    """Raised if this host cannot run the guest. The message says what to install."""


@dataclass(frozen=True)
class Kernel:
    image: Path
    modules: Path
    """The folder kernel/ of the modules of one version."""


def find(cache: Path) -> Kernel:
    """Returns the newest available kernel with Soft-RoCE: one unpacked in the cache first, then an installed one."""
    for root in (cache / "kernel", Path("/")):
        for image in sorted((root / "boot").glob("vmlinuz-*-amd64"), reverse=True):
            modules = root / "lib/modules" / image.name.removeprefix("vmlinuz-") / "kernel"
            if "cloud" not in image.name and any((modules / _RXE).glob("rdma_rxe.ko*")):
                return Kernel(image, modules)
    raise GuestUnavailable("no kernel with rdma_rxe: run `python -m tests.rdma.guest --prepare`")


def fetch(cache: Path) -> Kernel:
    """Unpacks Debian's kernel package into the cache. Installing it would change the host's boot loader."""
    try:
        return find(cache)
    except GuestUnavailable:
        pass
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        named = re.search(r"Depends: (linux-image-\S+)", _run(["apt-cache", "depends", "linux-image-amd64"], "/"))
        if named is None:
            raise GuestUnavailable("no package linux-image-amd64: run apt-get update on Debian")
        _run(["apt-get", "download", "-qq", named[1]], folder)
        (package,) = Path(folder).glob("*.deb")
        _run(["dpkg-deb", "-x", str(package), "unpacked"], folder)
        # The guest loads about thirty modules, and the package has 400 MB of them.
        (modules,) = Path(folder).glob("unpacked/lib/modules/*/kernel")
        needed = in_load_order(modules)
        for path in modules.rglob("*.ko*"):
            if f"{_name(path)}.ko" not in needed:
                path.unlink()
        shutil.rmtree(cache / "kernel", ignore_errors=True)
        (Path(folder) / "unpacked").rename(cache / "kernel")
    return find(cache)


def _run(command: list[str], folder: str) -> str:
    try:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise GuestUnavailable(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise GuestUnavailable(f"{' '.join(command)} failed: {error.stderr.strip()}") from error


def in_load_order(modules: Path) -> dict[str, bytes]:
    """Returns the wanted modules and their dependencies, each after what it needs: {file name: contents}."""
    files = {_name(path): path for path in modules.rglob("*.ko*") if path.name.endswith(_SUFFIXES)}
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        if f"{name}.ko" in ordered or name not in files:  # no file: built into this kernel
            return
        contents = files[name].read_bytes()
        contents = lzma.decompress(contents) if files[name].suffix == ".xz" else contents
        depends = _DEPENDS.search(contents)
        for needed in filter(None, (depends[1] if depends else b"").decode().split(",")):
            add(needed.replace("-", "_"))
        ordered[f"{name}.ko"] = contents

    for name in WANTED:
        add(name)
    return ordered


def _name(path: Path) -> str:
    return path.name.split(".")[0].replace("-", "_")
