"""Builds the guest's initial file system (busybox, modules and the init script) as a cpio archive.

Owns the format of the archive and its place in the cache, whose name is a hash of the content.
"""

import hashlib
import shutil
from pathlib import Path

from tests.rdma.guest.kernel import GuestUnavailable

_FOLDERS = ("bin", "modules", "proc", "sys", "dev", "host", "layer", "root")
_FILE, _FOLDER, _DEVICE = 0o100755, 0o040755, 0o020600


def build(modules: dict[str, bytes], cache: Path) -> Path:
    """Returns the path of the archive. Builds it unless an archive with this content is cached."""
    archive = _archive(modules)
    path = cache / f"initramfs-{hashlib.sha256(archive).hexdigest()[:16]}.cpio"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        for stale in cache.glob("initramfs-*.cpio"):
            stale.unlink()
        partial = path.with_suffix(".partial")
        partial.write_bytes(archive)
        partial.rename(path)
    return path


def _archive(modules: dict[str, bytes]) -> bytes:
    busybox = shutil.which("busybox")
    if not busybox:
        raise GuestUnavailable("busybox is not installed (package busybox-static)")
    entries = [_entry(folder, _FOLDER) for folder in _FOLDERS]
    # The kernel opens the console before devtmpfs is mounted.
    entries.append(_entry("dev/console", _DEVICE, device=(5, 1)))
    entries.append(_entry("bin/busybox", _FILE, Path(busybox).read_bytes()))
    entries.append(_entry("init", _FILE, (Path(__file__).parent / "init.sh").read_bytes()))
    entries += [_entry(f"modules/{name}", _FILE, module) for name, module in modules.items()]
    entries.append(_entry("modules/order", _FILE, "".join(f"{n}\n" for n in modules).encode()))
    entries.append(_entry("TRAILER!!!", 0))
    return b"".join(entries)


def _entry(name: str, mode: int, contents: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """Encodes one member in the "newc" format (kernel documentation: driver-api/early-userspace)."""
    encoded = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(contents), 0, 0, *device, len(encoded), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields)
    return _padded(header + encoded) + _padded(contents)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)
