"""Texts become rows of tokens: each character is predicted once, in the order of the seed, and read back unchanged."""

from __future__ import annotations

import os

import numpy as np
import pytest

from model_zoo import DataError, create_text_dataset
from model_zoo.data.text import IGNORED, Lines

pytestmark = pytest.mark.usefixtures("eager")
TEXT = "To be, or not to be: that is the question.\n" * 3


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def columns(dataset):
    tokens, targets = zip(*dataset.create_tuple_iterator(num_epochs=1, output_numpy=True))
    return np.concatenate(tokens), np.concatenate(targets)


def text_of(dataset, numbers):
    return dataset.source.data.vocabulary.decode(numbers)


@pytest.mark.parametrize("context", [1, 7, 200])
def test_each_token_is_predicted_once(file, context):
    cut = int(0.9 * len(TEXT))
    for usage, split in (("train", TEXT[:cut]), ("test", TEXT[cut:])):
        dataset = create_text_dataset(file, 1, context=context, usage=usage, shuffle=False)
        tokens, targets = columns(dataset)
        counts = targets != IGNORED
        assert text_of(dataset, targets[counts]) == split[1:] and text_of(dataset, tokens[counts]) == split[:-1]
        assert not tokens[~counts].any() and tokens.shape[1] == targets.shape[1] == context
        assert tokens.dtype == targets.dtype == np.int32


def test_each_line_is_a_sample(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\nthe second line\n" + "x" * 9)
    (tmp_path / "b.txt").write_text("another\nthe rest is the test split")
    shards = [Lines(tmp_path, usage="train", context=10, num_shards=2, shard_id=shard) for shard in (0, 1)]
    read = shards[0].data.vocabulary.decode
    samples = [[tuple(map(read, shard[number])) for number in range(len(shard))] for shard in shards]
    first = [("one", "ne\n"), (" line", "line\n"), ("another", "nother\n"), ("s the t" + "e", " the tes")]
    assert samples == [first, [("the second", "he second "), ("x" * 8, "x" * 8), ("the rest i", "he rest is")]]
    assert [shard.lengths.tolist() for shard in shards] == [[len(tokens) for tokens, _ in each] for each in samples]
    assert shards[0].rows == sum(map(len, shards)) and shards[0].fingerprint == shards[1].fingerprint
    with pytest.raises(ValueError, match="'num_shards' must be an int in .1, 7."):
        Lines(tmp_path, usage="train", context=10, num_shards=99)


def test_documents_of_a_folder_do_not_run_into_each_other(tmp_path):
    (tmp_path / "b").mkdir()
    contents = {"a.txt": "12345 789, " * 3, "b/c.txt": "x", "b/d.txt": "the third", "e.md": "not read", "z.txt": ""}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    dataset = create_text_dataset(tmp_path, 2, context=5, shuffle=False)
    tokens, targets = columns(dataset)
    rows = [text_of(dataset, row[row != IGNORED]) for row in targets]
    assert rows[:7] == ["2345 ", "789, ", "12345", " 789,", " 1234", "5 789", ", "]
    assert rows[7:] == ["he "]  # the document on the border is cut: the rest is the test split
    assert text_of(dataset, tokens[7][:3]) == "the"


def test_hidden_files_are_not_trained_on(tmp_path):
    """Copies that an editor or a system has left, in a folder that itself may be hidden."""
    folder = tmp_path / ".texts"
    (folder / ".checkpoints").mkdir(parents=True)
    (folder / "part").mkdir()
    for name in (".hidden.txt", ".checkpoints/copy.txt", "._book.txt"):
        (folder / name).write_text("XYZ" * 9)
    (folder / "part" / "book.txt").write_text("mine, and nothing else\n")
    characters = create_text_dataset(folder, 1, context=4).source.data.vocabulary.characters
    assert set(characters) == set("mine, and nothing else\n")


def test_any_text_is_read_back_unchanged(tmp_path):
    text = "梯度累积 gradient — 微批次\r\n🙂 " * 9
    (tmp_path / "中文.txt").write_bytes(text.encode())
    vocabulary = create_text_dataset(tmp_path, 1, context=9).source.data.vocabulary
    assert vocabulary.decode(vocabulary.encode(text)) == text and vocabulary.characters == "".join(sorted(set(text)))


def test_tokens_are_places_in_the_vocabulary(file, tmp_path):
    (tmp_path / "abc.txt").write_text("abc" * 20)
    dataset = create_text_dataset(tmp_path / "abc.txt", 2, context=6, shuffle=False, vocabulary="cab")
    assert columns(dataset)[0][0].tolist() == [1, 2, 0, 1, 2, 0]
    with pytest.raises(DataError, match=r"text\.txt' can't be read by a trained network: .* of 3: '\\n' ' ' ','"):
        create_text_dataset(file, 1, context=8, vocabulary="abc")


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        (b"\xff" + b"a" * 99, {}, DataError, r"x\.txt' is not UTF-8: byte 0 is 0xff"),
        (b"only a few words", {}, DataError, r"has 16 characters, too few"),
        (
            b"a" * 99,
            {"batch_size": 4, "context": 30},
            ValueError,
            r"'batch_size' must be <= 3, the number of train blo",
        ),
        (b"a" * 99, {"context": 0}, ValueError, r"'context' must be an int >= 1, but got 0"),
        (b"a" * 99, {"usage": "valid"}, ValueError, r"'usage' must be one of \('train', 'test'\)"),
        (b"a" * 99, {"vocabulary": "aba"}, ValueError, r"'vocabulary' must be a str that has each character once"),
    ],
)
def test_unusable_texts_and_arguments_are_rejected(tmp_path, content, options, error, message):
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(error, match=message):
        create_text_dataset(tmp_path / "x.txt", **{"batch_size": 2, **options})


def test_text_without_two_characters_in_a_row_is_too_short(tmp_path):
    """Each character but the first of a file, or a line, is predicted: here there is none."""
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("a")
    for usage, split in (("train", "training"), ("test", "test")):
        with pytest.raises(DataError, match=f"is too short: no file of its {split} split has two characters"):
            create_text_dataset(tmp_path, 1, usage=usage)
    (tmp_path / "lines").write_text("\n" * 99)
    with pytest.raises(DataError, match="lines' is too short: no line of its training split has two characters"):
        Lines(tmp_path / "lines", usage="train", context=8)


def test_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """Not a smaller text, which would silently train another network."""
    (tmp_path / "x.txt").write_text("a" * 99)
    (tmp_path / "private").mkdir()
    scan = os.scandir

    def without_rights(path):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", without_rights)
    with pytest.raises(PermissionError, match="private"):
        create_text_dataset(tmp_path, 2)


def sparse(path):
    path.touch()
    os.truncate(path, 2**30 + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, r"b\.txt' is not a file"),
        (sparse, r"b\.txt' has 1,073,741,825 bytes, more than 1,073,741,"),
        (lambda path: path.symlink_to("/dev/zero"), r"b\.txt' is a link, which may lead out of"),
        (lambda path: path.symlink_to("a.txt"), r"b\.txt' is a link"),
        (lambda path: path.with_name("part").symlink_to(path.parent.parent), "part' is a link"),
    ],
    ids=["pipe", "large", "device", "file", "folder"],
)
def test_only_files_of_the_folder_are_read(tmp_path, make, message):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    make(folder / "b.txt")
    with pytest.raises(DataError, match=message):
        create_text_dataset(folder, 2, context=8)


def test_text_that_is_named_may_be_a_link(file, tmp_path):
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "pipe").symlink_to("/dev/zero")
    assert create_text_dataset(tmp_path / "link", 2, context=8).get_dataset_size()
    with pytest.raises(DataError, match="pipe' is not a file"):
        create_text_dataset(tmp_path / "pipe", 2)


def test_missing_texts_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no'"):
        create_text_dataset(tmp_path / "no")
    with pytest.raises(FileNotFoundError, match=r"has no \.txt file"):
        create_text_dataset(tmp_path)
