"""Turns the corpus into packed token windows.

Owns the order of documents and windows. Its rule: epoch ``n`` of a seed is always the same token
stream, so a resumed run needs only the epoch and the number of windows it has taken.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

from models.corpus import SourceFile
from models.samples import Function, Message, find_functions, make_chat, make_snippet
from models.train_tokenizer import BOS, EOS, IM_END, IM_START, SPECIAL_IDS

Starts = np.ndarray  # int64, shape [num_windows]: places of windows in a stream
CHAT_SHARE = 0.06  # of the file tokens
SNIPPET_SHARE = 0.06


class TokenSource:
    """Makes the token stream of an epoch: every file once, plus fresh samples, shuffled."""

    def __init__(self, tokenizer: Tokenizer, files: Sequence[SourceFile], seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._documents = [self._document([file.text]) for file in files]
        self._functions = list(find_functions(files))

    @property
    def num_file_tokens(self) -> int:
        """Tokens in one pass over the files, samples not counted."""
        return sum(map(len, self._documents))

    def files_only(self) -> np.ndarray:
        """The stream of the files in their order, without samples: uint16, shape [num_tokens]."""
        return _concatenate(self._documents)

    def epoch_stream(self, epoch: int) -> np.ndarray:
        """The packed stream of ``epoch``: uint16 token ids, shape [num_tokens]."""
        rng = random.Random(f"{self._seed}-{epoch}")
        documents = list(self._documents)
        documents += self._take(self._chats(rng), CHAT_SHARE)
        documents += self._take(self._snippets(rng), SNIPPET_SHARE)
        rng.shuffle(documents)
        return _concatenate(documents)

    def _take(self, samples: Iterator[list[int]], share: float) -> list[list[int]]:
        budget = round(self.num_file_tokens * share)
        taken: list[list[int]] = []
        while budget > 0:
            taken.append(next(samples))
            budget -= len(taken[-1])
        return taken

    def _chats(self, rng: random.Random) -> Iterator[list[int]]:
        while True:
            yield self._chat(make_chat(self._draw(rng), rng))

    def _snippets(self, rng: random.Random) -> Iterator[list[int]]:
        while True:
            yield self._document(make_snippet(self._draw(rng), rng))

    def _draw(self, rng: random.Random) -> Function:
        return self._functions[rng.randrange(len(self._functions))]

    def _document(self, parts: Sequence[str]) -> list[int]:
        """Token ids of ``parts``, each tokenized by itself, between bos and eos."""
        tokens = [SPECIAL_IDS[BOS]]
        for part in parts:
            tokens += self._encode(part)
        return [*tokens, SPECIAL_IDS[EOS]]

    def _chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, as the chat template renders it, then eos."""
        tokens = [SPECIAL_IDS[BOS]]
        for message in messages:
            tokens += [SPECIAL_IDS[IM_START], *self._encode(f"{message.role}\n{message.content}")]
            tokens += [SPECIAL_IDS[IM_END], *self._encode("\n")]
        return [*tokens, SPECIAL_IDS[EOS]]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _concatenate(documents: Sequence[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.array(tokens, dtype=np.uint16) for tokens in documents])


def window_order(num_tokens: int, sequence_length: int, seed: int, epoch: int) -> Starts:
    """Starts of the windows of one epoch, shuffled.

    A window is ``sequence_length + 1`` tokens, as the last one is only a target. The first start
    is random, so the cuts differ between epochs.
    """
    generator = np.random.default_rng([seed, epoch, sequence_length])
    shift = int(generator.integers(sequence_length))
    starts = np.arange(shift, num_tokens - sequence_length, sequence_length, dtype=np.int64)
    return generator.permutation(starts)


def cut_windows(stream: np.ndarray, starts: Starts, sequence_length: int) -> np.ndarray:
    """Gather windows: int64, shape [len(starts), sequence_length + 1]."""
    offsets = np.arange(sequence_length + 1)
    return stream[starts[:, None] + offsets[None, :]].astype(np.int64)


def validation_starts(num_tokens: int, sequence_length: int) -> list[Starts]:
    """Starts of the whole windows of a stream, in order, in chunks of about 4,096 tokens."""
    starts = np.arange(0, num_tokens - sequence_length, sequence_length, dtype=np.int64)
    batch_size = max(1, 4096 // sequence_length)
    num_whole = len(starts) // batch_size * batch_size  # equal batches, so means can be averaged
    return np.split(starts[:num_whole], num_whole // batch_size)
