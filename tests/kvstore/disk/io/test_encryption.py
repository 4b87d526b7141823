"""Encryption at rest: the disk holds no plaintext, and nothing can be read without the right key."""

import dataclasses
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from moonserve.kvstore.disk.base import PAGE, DiskWrite, Place
from moonserve.kvstore.disk.io.format import page_of
from moonserve.kvstore.disk.tier import DiskOptions
from moonserve.protocol.errors import ConfigError
from tests.kvstore.disk.tiers import SMALL, found_in, opened, written

KEY = bytes(range(32))


def with_key(tmp_path: Path, content: bytes = KEY) -> DiskOptions:
    key_file = tmp_path / f"{content[:4].hex()}.key"
    key_file.write_bytes(content)
    return dataclasses.replace(SMALL, key_file=key_file)


async def test_objects_come_back_and_lie_encrypted_on_disk(tmp_path: Path) -> None:
    options, folder, content = with_key(tmp_path), tmp_path / "tier", (b"attack at dawn. " * 600)[:9_000]
    about = dataclasses.replace(written(1, 9_000).object, checksum=xxh3_64_intdigest(content))
    write = DiskWrite(object=about, memory=memoryview(content))
    async with opened(folder, options) as stand:
        assert await stand.put([write]) == [True]
        assert await stand.holds(write)
    hexadecimal = with_key(tmp_path, KEY.hex().encode() + b"\n")
    async with opened(folder, hexadecimal) as stand:
        assert await stand.holds(write)
        places = await stand.tier.write([write, write])
        content = max(folder.glob("segment-*")).read_bytes()
        first, second = (content[page_of(place or Place(0)) * PAGE :][PAGE:][:64] for place in places)
        assert first != second, "equal objects, and it shows"
        for place in places:
            stand.tier.release(place or Place(0))
    for path in folder.iterdir():
        assert b"attack" not in path.read_bytes()
    async with opened(tmp_path / "plain") as stand:
        await stand.put([write])
    assert b"attack" in next((tmp_path / "plain").glob("segment-*")).read_bytes()


async def test_the_wrong_key_no_key_and_a_needless_key_are_refused(tmp_path: Path) -> None:
    await found_in(tmp_path / "tier", with_key(tmp_path))
    await found_in(tmp_path / "plain")
    no_key = dataclasses.replace(SMALL, key_file=tmp_path / "none")
    for folder, options, message in (
        ("new", with_key(tmp_path, b"short"), "must hold 32 bytes"),
        ("new", no_key, "cannot be read"),
        ("tier", with_key(tmp_path, KEY[::-1]), "another key"),
        ("tier", SMALL, "its key file is needed"),
        ("plain", with_key(tmp_path), "is not encrypted"),
    ):
        with pytest.raises(ConfigError, match=message):
            await found_in(tmp_path / folder, options)


async def test_ciphertext_moved_to_another_place_is_not_believed(tmp_path: Path) -> None:
    """Two objects of the same length whose headers and ciphertexts are swapped on disk both read as misses."""
    options, folder = with_key(tmp_path), tmp_path / "tier"
    writes = [written(1, 4_000), written(2, 4_000)]
    async with opened(folder, options) as stand:
        await stand.put(writes)
        path = next(folder.glob("segment-*"))
        content = bytearray(path.read_bytes())
        first, second = slice(PAGE, 3 * PAGE), slice(3 * PAGE, 5 * PAGE)
        content[first], content[second] = content[second], content[first]
        path.write_bytes(content)
        for write in writes:
            assert await stand.get(write.object) is None
