"""XXH3-64 of values that arrive in parts and of short ones, compared with the library."""

import ctypes
import random
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from moonserve.protocol.process.native_libraries import C_FLAGS, compile_library
from moonserve.transfer.memory.data_plane import SHORT_VALUE, SOURCE

HASH_PARTS = f"""
#include "{SOURCE.with_name("xxh3.h")}"
__attribute__((visibility("default"))) uint64_t hash_parts(const uint8_t *bytes, uint64_t length, uint64_t part) {{
    Xxh3 hash = {{.position = 0}};
    for (uint64_t at = 0; at < length; at += part)
        xxh3_add(&hash, bytes + at, length - at < part ? length - at : part, length);
    return xxh3_end(&hash);
}}
__attribute__((visibility("default"))) uint64_t hash_short(const uint8_t *bytes, uint64_t length) {{
    return xxh3_short(bytes, length);
}}
"""


@pytest.mark.parametrize("flags", [(), ("-DPORTABLE",)])
def test_any_value_in_parts_of_any_size_has_the_hash_of_the_library(tmp_path: Path, flags: tuple[str, ...]) -> None:
    source = tmp_path / "hash.c"
    source.write_text(HASH_PARTS)
    compile_library(source, (*C_FLAGS, *flags), tmp_path / "hash.so")
    library = ctypes.CDLL(str(tmp_path / "hash.so"))
    hash_parts, hash_short = library.hash_parts, library.hash_short
    hash_parts.argtypes, hash_parts.restype = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64), ctypes.c_uint64
    hash_short.argtypes, hash_short.restype = (ctypes.c_char_p, ctypes.c_uint64), ctypes.c_uint64
    draw = random.Random(1)
    data = draw.randbytes(70_000)
    for length in range(17, SHORT_VALUE + 1):
        assert hash_short(data, length) == xxh3_64_intdigest(data[:length]), length
    for length in (*range(SHORT_VALUE + 1, 2_500), *(draw.randrange(2_500, len(data)) for _ in range(200))):
        for part in (length, 64, draw.randrange(1, length)):
            assert hash_parts(data, length, part) == xxh3_64_intdigest(data[:length]), (length, part)
