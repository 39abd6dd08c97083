"""Text as rows of tokens: each row is a block of a document, and each character is predicted exactly once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from mindspore.dataset import GeneratorDataset

from .._check import DataError, check_bool, check_choice, check_int, check_path
from .batches import batched, seed_of
from .files import size_of
from .sentences import sentences

IGNORED = -100
"""int, the target of padding, which does not count."""
_NAME = "create_text_dataset"
_TRAINED = 0.9
_LARGEST = 2**30  # bytes of all texts: as tokens they take four times as much, or more
_SHOWN = 5  # of the characters that a vocabulary does not have


class Vocabulary:
    """The tokens of a text.

    Args:
        characters (str): All characters, in the order of their tokens.
    """

    def __init__(self, characters: str) -> None:
        self.characters = characters
        """str, all characters, in the order of their tokens."""
        self._codes = _codes(characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text.

        Raises:
            ValueError: If it has a character that is not in the vocabulary.
        """
        codes, token_of = _codes(text), np.full(0x110000, -1, np.int32)  # of each character that Unicode may have
        token_of[self._codes] = np.arange(len(self._codes))
        tokens = token_of[codes]
        if (tokens < 0).any():
            few = " ".join(repr(chr(code)) for code in np.unique(codes[tokens < 0])[:_SHOWN])
            raise ValueError(f"a character is not in the vocabulary of {len(self.characters)}: {few}")
        return tokens

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens."""
        return self._codes[np.asarray(tokens, np.int64)].tobytes().decode("utf-32-le")


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


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
        begins = [0, *ends[:-1]]
        # The last token of a document is only predicted.
        starts = [np.arange(begin, end - 1, context) for begin, end in zip(begins, ends)]
        lengths = [np.minimum(context, end - 1 - start) for start, end in zip(starts, ends)]
        self._starts, self._lengths = np.concatenate(starts), np.concatenate(lengths)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, of all tokens, and of where blocks begin."""
        digest = hashlib.sha256(f"{self.vocabulary.characters}{self._context}".encode())
        for numbers in (self._tokens, self._starts):
            digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()[:16]

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens in each block, without padding."""
        return self._lengths

    def block(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a block, and their targets, without padding."""
        first, last = self._starts[row], self._starts[row] + self._lengths[row]
        return self._tokens[first:last], self._tokens[first + 1 : last + 1]

    def columns(self, rows: np.ndarray, pass_number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of these blocks, and their targets; padding is 0, and -100."""
        offsets = np.arange(self._context + 1)
        places = np.minimum(self._starts[rows][:, np.newaxis] + offsets, len(self._tokens) - 1)
        block, is_padding = self._tokens[places], offsets[:-1] >= self._lengths[rows][:, np.newaxis]
        tokens, targets = block[:, :-1].copy(), block[:, 1:].copy()  # not views of each other
        tokens[is_padding], targets[is_padding] = 0, IGNORED
        return tokens, targets


class Lines:
    """The lines of a text, samples of different lengths: of each its tokens, and the token after each.

    The splits and the tokens are those of `create_text_dataset`. A line of more than `context` tokens is several
    samples.

    Args:
        data_path (str): As for `create_text_dataset`.
        usage (str): ``"train"`` or ``"test"``.
        context (int): The most tokens of a sample.
        vocabulary (str): As for `create_text_dataset`. Default: ``None``.
        num_shards (int): The number of shards. Default: ``1``.
        shard_id (int): The shard to take. Default: ``0``.

    Raises:
        ValueError: If there are fewer samples than shards.
        DataError, FileNotFoundError: As for `create_text_dataset`.
    """

    def __init__(
        self,
        data_path: str | PathLike[str] | None,
        *,
        usage: str,
        context: int,
        vocabulary: str | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
    ) -> None:
        self.data = _split(data_path, usage == "train", context, vocabulary, by_line=True)
        """TextRows, the samples of all shards."""
        self.rows = len(self.data)
        """int, the number of samples, over all shards."""
        check_int("Lines", "num_shards", num_shards, low=1, high=self.rows)
        self._numbers = range(shard_id, self.rows, num_shards)

    @property
    def fingerprint(self) -> str:
        """str, a fingerprint of the data."""
        return self.data.fingerprint

    @property
    def lengths(self) -> np.ndarray:
        """ndarray, the number of tokens of each sample."""
        return self.data.lengths[self._numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return self.data.block(self._numbers[number])


def create_text_dataset(
    data_path: str | PathLike[str] | None = None,
    batch_size: int = 32,
    *,
    usage: str = "train",
    context: int = 64,
    vocabulary: str | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    num_shards: int = 1,
    shard_id: int = 0,
    drop_remainder: bool = False,
) -> GeneratorDataset:
    """Create a dataset of batches of a text, whose tokens are its characters.

    The columns are `tokens` and `targets`, int32 of shape (N, context): the blocks of each document one after the
    other, and the token after each. A document's last block is padded with the token 0 and the target -100, which
    `nn.CrossEntropyLoss` ignores, so micro-batches are weighted by their targets: `NextTokenLoss.weight`.

    The first 90 % of the tokens are the training split, the rest the test split, for validation. The order of an epoch,
    and the epoch with which an iterator begins, are as for `create_dataset`.

    Args:
        data_path (str): A text file in UTF-8, or a folder whose files ``*.txt``, also in its folders, are documents in
            the order of their paths, without hidden ones; at most 1 GiB. A link in the folder is an error. Default:
            ``None``, sentences that a small grammar makes.
        batch_size (int): The number of rows in a batch. Default: ``32``.
        usage (str): ``"train"`` or ``"test"``. Default: ``"train"``.
        context (int): The number of tokens in a row. Default: ``64``.
        vocabulary (str): The characters that a trained network has, in the order of their tokens. Default: ``None``,
            those of the text.
        shuffle (bool): Whether each epoch has a different random order. Default: ``None``, for the training split only.
        seed (int): The seed of the order. Default: ``None``, `mindspore.get_seed()`, or 0 if it is not set.
        num_shards (int), shard_id (int), drop_remainder (bool): As for `create_dataset`.

    Returns:
        GeneratorDataset, the batches; `source.data.vocabulary` encodes and decodes.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        DataError: If a file is not UTF-8, has a character that is not in the vocabulary, is too large, or is no file,
            or a link in the folder; a subclass of ValueError.
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
    check_int(_NAME, "context", context, low=1)
    if vocabulary is not None and not (isinstance(vocabulary, str) and 0 < len(vocabulary) == len(set(vocabulary))):
        raise ValueError(f"For '{_NAME}', 'vocabulary' must be a str that has each character once.")
    is_training, seed = usage == "train", seed_of(_NAME, seed)
    shuffle = is_training if shuffle is None else check_bool(_NAME, "shuffle", shuffle)
    return batched(
        _NAME,
        _split(data_path, is_training, context, vocabulary),
        ["tokens", "targets"],
        f"{usage} blocks of {context} tokens",
        is_training=is_training,
        batch_size=batch_size,
        seed=seed if shuffle else None,
        num_shards=num_shards,
        shard_id=shard_id,
        drop_remainder=drop_remainder,
    )


def _split(
    data_path: str | PathLike[str] | None,
    is_training: bool,
    context: int,
    characters: str | None,
    *,
    by_line: bool = False,
) -> TextRows:
    """Return a split: the first 90 % of the tokens, or the rest. The document, or line, on the border becomes two."""
    path = None if data_path is None else check_path(_NAME, "data_path", data_path)
    texts = {"the sentences": sentences()} if path is None else {str(file): _text_of(file) for file in _files(path)}
    vocabulary = Vocabulary("".join(sorted(set().union(*texts.values()))) if characters is None else characters)
    parts = []
    for name, text in texts.items():
        try:
            parts.append(vocabulary.encode(text))
        except ValueError as error:
            raise DataError(f"'{name}' can't be read by a trained network: {error}.") from error
    tokens, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts]).tolist()
    if by_line:
        lines = np.flatnonzero(tokens == vocabulary.characters.find("\n")) + 1
        ends = np.union1d(ends, lines).tolist()
    if len(tokens) < 20:
        raise DataError(f"'{path}' has {len(tokens)} characters, too few for a training and a test split.")
    cut = int(_TRAINED * len(tokens))
    if is_training:
        rows = TextRows(tokens[:cut], [*(end for end in ends if end < cut), cut], context, vocabulary)
    else:
        rows = TextRows(tokens[cut:], [end - cut for end in ends if end > cut], context, vocabulary)
    if not len(rows):
        split, unit = "training" if is_training else "test", "line" if by_line else "file"
        raise DataError(f"'{path}' is too short: no {unit} of its {split} split has two characters.")
    return rows


def _files(path: Path) -> list[Path]:
    """Return the file, or the text files of a folder in the order of their paths, without hidden ones.

    Editors and systems leave copies there: ``.ipynb_checkpoints``, ``._book.txt``.

    Raises:
        DataError: If one is not a file, or a link, which may lead out of the folder, or if all are too large.
    """
    files = sorted(_texts_in(path)) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"'{path}' has no .txt file.")
    left = _LARGEST
    for file in files:
        if file != path and file.is_symlink():
            raise DataError(f"'{file}' is a link, which may lead out of '{path}'. Copy there what it names.")
        left -= size_of(file, left)
    return files


def _texts_in(path: Path) -> Iterator[Path]:
    """Yield the text files of a folder, and folders that are links, which are not silently left out."""
    for folder, folders, names in os.walk(path, onerror=_raise):  # nor is what can't be read
        texts = [name for name in names if name.endswith(".txt")]
        for file in (Path(folder, name) for name in (*folders, *texts)):
            is_hidden = any(part[0] == "." for part in file.relative_to(path).parts)
            if not is_hidden and (file.name in texts or file.is_symlink()):
                yield file


def _raise(error: OSError) -> None:
    raise error


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"'{file}' is not UTF-8: byte {error.start:,} is 0x{byte:02x}. Convert it to UTF-8.") from error
