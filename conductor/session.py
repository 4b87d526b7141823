"""What a prompt has in common with the other requests of its conversation. Pure.

A client's session id says it. Without one, the chain of blocks does: nearly all prompts begin with blocks that many
conversations share (a system prompt), and the block behind the last of them is the conversation's own and stays in
every later turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conductor.columns import Ints
from protocol.keys import BlockKey

# A prompt that many conversations begin with has more continuations than the edited turns of one of them.
LEAST_FORK = 4


def first_distinguishing(keys: Sequence[BlockKey], children: Ints) -> bytes:
    """The block that follows the widest fork of a chain; its first block where nothing forks; empty without blocks.

    `children`: how many different blocks are known to follow each of the leading blocks of `keys`.
    """
    if not keys:
        return b""
    widest = int(np.argmax(children)) if len(children) else 0
    is_fork = widest < len(children) and children[widest] > LEAST_FORK
    return keys[min(widest + 1, len(keys) - 1)] if is_fork else keys[0]
