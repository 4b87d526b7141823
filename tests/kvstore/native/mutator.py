"""Changes an index and rewrites its data in place as fast as possible, in a process that runs until it is killed.

`python -m tests.kvstore.native.mutator FD BYTES`: the file's first page holds the offset of the current index and of
the index that the reader uses; the data follows, then every memory that the index has had. The index grows only while
the reader uses the current one, so that no reader, however late, misses a move.
"""

import mmap
import os
import random
import struct
import sys

import numpy as np

from moonserve.kvstore.index_layout import Entry
from moonserve.kvstore.published_index import KeyIndex
from moonserve.protocol.kv_blocks import BlockKey

PAGE = 4096
NUM_PLACES = 48
NUM_STABLE = 8
"""The first keys, which are moved but never removed."""
NUM_KEYS = 40
"""Keys below this number come and go; keys from it on are only added, so that the index grows."""
MAX_KEYS = 700
OBJECT_BYTES = 4096
DATA_END = PAGE + NUM_PLACES * OBJECT_BYTES
WHERE = struct.Struct("Q")
"""Format of the index's offset, at the file's start."""
READ_AT = WHERE.size
"""Position at which the reader writes the offset of the index that it uses."""


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def content_of(number: int, generation: int) -> int:
    """Returns the 8-byte value that an object repeats."""
    return generation << 20 | number


class Mutator:
    """Applies random changes to the index and its data, one per step."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memoryview(memory)
        self._data = np.frombuffer(self._memory[PAGE:DATA_END], np.uint64).reshape(NUM_PLACES, -1)
        self._end = DATA_END
        self._where = 0
        self._index = KeyIndex(self._allocate)
        self._generation = 0
        self._free = list(range(NUM_PLACES))  # more places than keys with an object
        self._num_keys = NUM_KEYS
        self._random = random.Random(1)
        for number in range(NUM_STABLE):
            self._insert(number)
        self._publish()

    def step(self) -> None:
        number = self._random.randrange(NUM_KEYS)
        key = key_of(number)
        entry = self._index.find(key)
        if entry is None:
            self._insert(number)
        elif number < NUM_STABLE or self._random.random() < 0.5:  # to another place, to disk or back
            self._index.relocate(key, None if self._random.random() < 0.2 else self._written(number, entry.generation))
            self._give_back(entry.offset)
        else:
            self._index.remove(key)
            self._give_back(entry.offset)
        is_read = WHERE.unpack_from(self._memory, READ_AT) == (self._where,)
        if self._num_keys < MAX_KEYS and self._random.random() < 0.02 and is_read:
            self._index.insert(key_of(self._num_keys), Entry(0, 1, 0, 1, None))
            self._num_keys += 1
        self._publish()

    def _allocate(self, nbytes: int) -> memoryview:
        self._where, self._end = self._end, self._end + nbytes
        return self._memory[self._where : self._end]

    def _publish(self) -> None:
        self._memory[: WHERE.size] = WHERE.pack(self._where)  # atomic, unlike `pack_into`

    def _insert(self, number: int) -> None:
        self._generation += 1
        offset = self._written(number, self._generation)
        self._index.insert(key_of(number), Entry(number, self._generation, number, OBJECT_BYTES, offset))

    def _written(self, number: int, generation: int) -> int:
        """Writes this object's content to a free place and returns its offset."""
        place = self._free.pop(self._random.randrange(len(self._free)))
        self._data[place] = content_of(number, generation)
        return place * OBJECT_BYTES

    def _give_back(self, offset: int | None) -> None:
        if offset is not None:
            place = offset // OBJECT_BYTES
            self._data[place] = 2**64 - 1  # a reader that copied it meanwhile must notice
            self._free.append(place)


def main() -> None:
    fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
    mutator = Mutator(mmap.mmap(fd, nbytes))
    print("ready", flush=True)  # noqa: T201
    parent = os.getppid()
    while os.getppid() == parent:  # ends if the test process was killed
        for _ in range(1000):
            mutator.step()


if __name__ == "__main__":
    main()
