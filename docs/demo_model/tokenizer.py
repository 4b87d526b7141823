"""The demo model's byte-level BPE tokenizer; its chat template is in `demo/tokenizer_config.json`.

`decode(encode(text)) == text` for any text, because the base alphabet is all 256 bytes.
"""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

VOCABULARY_SIZE = 4096

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, IM_START, IM_END)
SPECIAL_IDS = {token: place for place, token in enumerate(SPECIAL_TOKENS)}  # the trainer's order

# One alternative per kind of piece. Line breaks and the following indentation are one piece, so a new line of Python
# costs one token at any depth.
SPLIT_PATTERN = (
    r"(?:\r?\n)+[ \t]*"  # line breaks and the next line's indentation
    r"|[ .(@]?[\p{L}_]+"  # a word or identifier, with the mark that introduces it
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}_]+"  # operators and brackets, with the space before them
    r"|[ \t]+(?=\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains a tokenizer of exactly `VOCABULARY_SIZE` entries."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, SPECIAL_IDS[BOS])],
    )
    return tokenizer
