"""Text as rows of tokens: each row is a block of a document, and each token is predicted exactly once."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Callable

import numpy as np
from mindspore.dataset import GeneratorDataset

from .._check import DataError, check_bool, check_choice, check_int, check_path
from .batches import batched, seed_of
from .sentences import sentences

CHARACTERS, BYTES = "characters", "bytes"
IGNORED = -100
"""int, the target of padding, which does not count."""
TRAINED = 0.9
_NAME = "create_text_dataset"
_SHOWN = 5  # of the characters that a vocabulary does not have


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a text.

    Attributes:
        level: ``"characters"`` or ``"bytes"``.
        characters: All characters in the order of their numbers, which are the tokens; empty for bytes.
    """

    level: str
    characters: str = ""

    @property
    def size(self) -> int:
        """int, the number of different tokens."""
        return 256 if self.level == BYTES else len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text.

        Raises:
            ValueError: If it has a character that is not in the vocabulary.
        """
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a character is not valid Unicode: {text[error.start]!r}") from error
        if self.level == BYTES:
            return np.frombuffer(encoded, np.uint8)
        known, codes = _codes(self.characters), _codes(text)
        order = np.argsort(known)
        tokens = order[np.minimum(np.searchsorted(known, codes, sorter=order), len(known) - 1)]
        unknown = codes[known[tokens] != codes]
        if len(unknown):
            few = " ".join(repr(chr(code)) for code in np.unique(unknown)[:_SHOWN])
            raise ValueError(f"a character is not in the vocabulary of {self.size}: {few}")
        return tokens.astype(_smallest(self.size))

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens; of bytes, invalid ones become U+FFFD."""
        tokens = np.asarray(tokens, np.int64)
        if self.level == BYTES:
            return tokens.astype(np.uint8).tobytes().decode(errors="replace")
        return _codes(self.characters)[tokens].tobytes().decode("utf-32-le")

    def decoder(self) -> Callable[[int], str]:
        """Return a function that decodes one token after the other: a character comes with its last byte."""
        if self.level == BYTES:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda token: decoder.decode(bytes([token]))
        return self.characters.__getitem__


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _smallest(size: int) -> Any:
    """Return the smallest type for so many tokens: a text may be large."""
    return np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.int32


class TextRows:
    """Blocks of documents, as columns: the tokens, and the token after each.

    Args:
        tokens (ndarray): The tokens of all documents.
        ends (Sequence[int]): Where each document ends.
        context (int): The tokens in a block; a document's last one is padded.
        vocabulary (Vocabulary): The tokens.
    """

    def __init__(self, tokens: np.ndarray, ends: Sequence[int], context: int, vocabulary: Vocabulary) -> None:
        self._tokens, self._context = tokens, context
        self.vocabulary = vocabulary
        """Vocabulary, the tokens."""
        starts, lengths, begin = [], [], 0
        for end in ends:  # the last token of a document is only predicted
            starts.append(np.arange(begin, end - 1, context))
            lengths.append(np.minimum(context, end - 1 - starts[-1]))
            begin = end
        self._starts = np.concatenate(starts) if starts else np.empty(0, np.int64)
        self._lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, of all tokens, and of where blocks begin."""
        digest = hashlib.sha256(f"{self.vocabulary.level}{self.vocabulary.characters}{self._context}".encode())
        for numbers in (self._tokens, self._starts):
            digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()[:16]

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the text, in types that JSON supports."""
        vocabulary = self.vocabulary
        return {
            "level": vocabulary.level,
            "vocabulary": vocabulary.characters,
            "tokens": int(self._lengths.sum()),
        }

    def columns(self, rows: np.ndarray, pass_number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of these blocks, and their targets; padding is 0, and -100."""
        offsets = np.arange(self._context + 1)
        places = np.minimum(self._starts[rows][:, np.newaxis] + offsets, len(self._tokens) - 1)
        block, is_padding = self._tokens[places].astype(np.int32), offsets[:-1] >= self._lengths[rows][:, np.newaxis]
        tokens, targets = block[:, :-1].copy(), block[:, 1:].copy()  # not views of each other
        tokens[is_padding], targets[is_padding] = 0, IGNORED
        return tokens, targets


def create_text_dataset(
    data_path: str | PathLike[str] | None = None,
    batch_size: int = 32,
    *,
    usage: str = "train",
    context: int = 64,
    level: str = CHARACTERS,
    vocabulary: str | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    num_shards: int = 1,
    shard_id: int = 0,
    drop_remainder: bool = False,
) -> GeneratorDataset:
    """Create a dataset of batches of a text.

    The columns are `tokens` and `targets`, int32 of shape (N, context): the blocks of each document one after the
    other, and the token after each. A document's last block is padded with the token 0 and the target -100, which
    `nn.CrossEntropyLoss` ignores, so micro-batches are weighted by their targets: `NextTokenLoss.weight`.

    The first 90 % of the tokens are the training split, the rest the test split, for validation. The order of an epoch,
    and the epoch with which an iterator begins, are as for `create_dataset`.

    Args:
        data_path (str): A text file in UTF-8, or a folder whose files ``*.txt``, also in its folders, are documents in
            the order of their paths; links to files outside the folder are left out. Default: ``None``, sentences
            that a small grammar makes.
        batch_size (int): The number of rows in a batch. Default: ``32``.
        usage (str): ``"train"`` or ``"test"``. Default: ``"train"``.
        context (int): The number of tokens in a row. Default: ``64``.
        level (str): What a token is: ``"characters"`` or ``"bytes"``. Default: ``"characters"``.
        vocabulary (str): The characters that a trained network has, in the order of their tokens; not for bytes.
            Default: ``None``, those of the text.
        shuffle (bool): Whether each epoch has a different random order. Default: ``None``, for the training split only.
        seed (int): The seed of the order. Default: ``None``, `mindspore.get_seed()`, or 0 if it is not set.
        num_shards (int), shard_id (int), drop_remainder (bool): As for `create_dataset`.

    Returns:
        GeneratorDataset, the batches; `source.data.vocabulary` encodes and decodes.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        DataError: If a file is not UTF-8, or has a character that is not in the vocabulary; a subclass of ValueError.
        FileNotFoundError: If there is no text.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)

    Examples:
        >>> from model_zoo import create_text_dataset
        >>> text = create_text_dataset(batch_size=8, context=24, usage="test")
        >>> tokens, targets = next(text.create_tuple_iterator(num_epochs=1))
        >>> tokens.shape, text.source.data.vocabulary.decode(targets[0].asnumpy())
        ((8, 24), ' tables likes the letter')
    """
    check_choice(_NAME, "usage", usage, choices=("train", "test"))
    check_choice(_NAME, "level", level, choices=(CHARACTERS, BYTES))
    check_int(_NAME, "context", context, low=1)
    if vocabulary is not None:
        _check_vocabulary(vocabulary, level)

    path = None if data_path is None else check_path(_NAME, "data_path", data_path)
    documents, tokens, known = _read(path, level, vocabulary)
    is_training, seed = usage == "train", seed_of(_NAME, seed)
    shuffle = is_training if shuffle is None else check_bool(_NAME, "shuffle", shuffle)
    return batched(
        _NAME,
        _split(documents, tokens, usage, context, known),
        ["tokens", "targets"],
        f"{usage} blocks of {context} tokens",
        is_training=is_training,
        batch_size=batch_size,
        seed=seed if shuffle else None,
        num_shards=num_shards,
        shard_id=shard_id,
        drop_remainder=drop_remainder,
    )


def _check_vocabulary(vocabulary: Any, level: str) -> None:
    """Raise an error if this is not a vocabulary."""
    if not isinstance(vocabulary, str):
        raise TypeError(f"For '{_NAME}', 'vocabulary' must be a str, but got {type(vocabulary).__name__}.")
    if level == BYTES:
        raise ValueError(f"For '{_NAME}', 'vocabulary' must be None with level='bytes', but got a str.")
    if not vocabulary or len(set(vocabulary)) < len(vocabulary):
        raise ValueError(f"For '{_NAME}', 'vocabulary' must have characters, and each once.")


def _split(ends: Sequence[int], tokens: np.ndarray, usage: str, context: int, vocabulary: Vocabulary) -> TextRows:
    """Return a split: the first 90 % of the tokens, or the rest. The document on the border becomes two."""
    cut = int(TRAINED * len(tokens))
    if usage == "train":
        return TextRows(tokens[:cut], [*(end for end in ends if end < cut), cut], context, vocabulary)
    return TextRows(tokens[cut:], [end - cut for end in ends if end > cut], context, vocabulary)


# The files


def _read(path: Path | None, level: str, characters: str | None) -> tuple[list[int], np.ndarray, Vocabulary]:
    """Return where documents end, the tokens of all, and the vocabulary."""
    files = [] if path is None else _files(path)
    if level == BYTES:
        contents = [np.frombuffer(_bytes_of(file), np.uint8) for file in files] or [_embedded_bytes()]
        vocabulary, parts = Vocabulary(BYTES), contents
    else:
        texts = [_text_of(file) for file in files] or [sentences()]
        if characters is None:
            codes = np.unique(np.concatenate([np.unique(_codes(text)) for text in texts]))
            characters = codes.tobytes().decode("utf-32-le")
        vocabulary = Vocabulary(CHARACTERS, characters)
        parts = [_encoded(vocabulary, text, file) for text, file in zip(texts, files or [Path("the sentences")])]
    ends = np.cumsum([len(part) for part in parts]).tolist()
    if ends[-1] < 20:
        raise DataError(
            f"'{path}' has {ends[-1]} token{'' if ends[-1] == 1 else 's'}, too few for a training and a test split."
        )
    return ends, parts[0] if len(parts) == 1 else np.concatenate(parts), vocabulary


def _embedded_bytes() -> np.ndarray:
    return np.frombuffer(sentences().encode(), np.uint8)


def _encoded(vocabulary: Vocabulary, text: str, file: Path) -> np.ndarray:
    try:
        return vocabulary.encode(text)
    except ValueError as error:
        raise DataError(f"'{file}' can't be read by a trained network: {error}.") from error


def _files(path: Path) -> list[Path]:
    """Return the file, or the text files of a folder in the order of their paths, without links out of it."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        fault = "is neither a text file nor a folder with .txt files" if path.exists() else "does not exist"
        raise FileNotFoundError(f"'{path}' {fault}.")
    root = path.resolve()
    walk = os.walk(path, onerror=_raise)  # not silently without what can't be read
    paths = [Path(folder, name) for folder, _, names in walk for name in names if name.endswith(".txt")]
    files = sorted(file for file in paths if file.is_file() and root in file.resolve().parents)
    if not files:
        raise FileNotFoundError(f"'{path}' has no .txt file.")
    return files


def _raise(error: OSError) -> None:
    raise error


def _bytes_of(file: Path) -> bytes:
    return file.read_bytes()


def _text_of(file: Path) -> str:
    try:
        return _bytes_of(file).decode()
    except UnicodeDecodeError as error:
        remedy = "Use bytes as tokens (level='bytes'; --vocabulary bytes of train.py), or convert it."
        raise DataError(
            f"'{file}' is not UTF-8: byte {error.start:,} is 0x{error.object[error.start]:02x}. {remedy}"
        ) from error
