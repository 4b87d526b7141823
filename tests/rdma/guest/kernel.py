"""The guest's kernel and the modules it loads, taken from a Debian kernel package.

Owns where they come from (installed, or fetched and unpacked) and the order in which modules load.
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
    "crc32_generic",  # rxe asks the crypto layer for crc32 by name; nothing pulls it in
    "crc32_pclmul",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)
_RXE = "drivers/infiniband/sw/rxe"
_SUFFIXES = (".ko", ".ko.xz")
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


class GuestUnavailable(Exception):
    """This host cannot run the guest; the text says what to install."""


@dataclass(frozen=True)
class Kernel:
    image: Path
    modules: Path
    """The folder kernel/ of one version's modules."""


def find(cache: Path) -> Kernel:
    """The newest kernel at hand that has Soft-RoCE: one unpacked in the cache, or an installed one."""
    for root in (cache / "kernel", Path("/")):
        for image in sorted((root / "boot").glob("vmlinuz-*-amd64"), reverse=True):
            modules = root / "lib/modules" / image.name.removeprefix("vmlinuz-") / "kernel"
            if "cloud" not in image.name and any((modules / _RXE).glob("rdma_rxe.ko*")):
                return Kernel(image, modules)
    raise GuestUnavailable("no kernel with rdma_rxe: run `python -m tests.rdma.guest --prepare`")


def fetch(cache: Path) -> Kernel:
    """Unpack Debian's kernel package into the cache; installing it would touch the host's boot loader."""
    try:
        return find(cache)
    except GuestUnavailable:
        pass
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        _run(["apt-get", "download", "-qq", _package()], folder)
        (package,) = Path(folder).glob("*.deb")
        _run(["dpkg-deb", "-x", str(package), "unpacked"], folder)
        _drop_unneeded(Path(folder) / "unpacked")
        shutil.rmtree(cache / "kernel", ignore_errors=True)
        (Path(folder) / "unpacked").rename(cache / "kernel")
    return find(cache)


def _drop_unneeded(unpacked: Path) -> None:
    """A kernel package is 400 MB of modules; the guest loads some thirty of them."""
    (modules,) = unpacked.glob("lib/modules/*/kernel")
    needed = in_load_order(modules)
    for path in modules.rglob("*.ko*"):
        if f"{_name(path)}.ko" not in needed:
            path.unlink()


def _package() -> str:
    shown = _run(["apt-cache", "depends", "linux-image-amd64"], "/")
    if found := re.search(r"Depends: (linux-image-\S+)", shown):
        return found[1]
    raise GuestUnavailable("no package linux-image-amd64: run apt-get update on Debian")


def _run(command: list[str], folder: str) -> str:
    try:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise GuestUnavailable(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise GuestUnavailable(f"{' '.join(command)} failed: {error.stderr.strip()}") from error


def in_load_order(modules: Path) -> dict[str, bytes]:
    """The wanted modules and all they depend on, each after what it needs: {file name: contents}."""
    files = {_name(path): path for path in modules.rglob("*.ko*") if path.name.endswith(_SUFFIXES)}
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        if f"{name}.ko" in ordered or name not in files:  # not a file: built into this kernel
            return
        contents = _contents(files[name])
        depends = _DEPENDS.search(contents)
        for needed in filter(None, (depends[1] if depends else b"").decode().split(",")):
            add(needed.replace("-", "_"))
        ordered[f"{name}.ko"] = contents

    for name in WANTED:
        add(name)
    return ordered


def _name(path: Path) -> str:
    return path.name.split(".")[0].replace("-", "_")


def _contents(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
