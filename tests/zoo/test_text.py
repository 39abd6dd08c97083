"""Texts become rows of tokens: each token is predicted once, in the order of the seed, and read back unchanged."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from model_zoo import DataError, create_text_dataset
from model_zoo.data import sentences as embedded
from model_zoo.data.text import IGNORED, Vocabulary

TEXT = "To be, or not to be: that is the question.\n" * 3


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def batches(dataset):
    return [tuple(column.asnumpy() for column in batch) for batch in dataset.create_tuple_iterator(num_epochs=1)]


def columns(dataset):
    tokens, targets = zip(*batches(dataset))
    return np.concatenate(tokens), np.concatenate(targets)


def text_of(dataset, numbers):
    return dataset.source.data.vocabulary.decode(numbers)


# Blocks


@pytest.mark.parametrize("context", [1, 7, 16, 200])
def test_each_token_is_predicted_once(file, context):
    dataset = create_text_dataset(file, 4, context=context, usage="test")
    tokens, targets = columns(dataset)
    counts = targets != IGNORED
    split = TEXT[int(0.9 * len(TEXT)) :]
    assert text_of(dataset, targets[counts]) == split[1:] and text_of(dataset, tokens[counts]) == split[:-1]
    assert dataset.source.facts["tokens"] == counts.sum() == len(split) - 1
    assert not tokens[~counts].any() and tokens.shape[1] == targets.shape[1] == context
    assert tokens.dtype == targets.dtype == np.int32


def test_splits_are_the_first_90_percent_and_the_rest(file):
    read = ""
    for usage in ("train", "test"):
        part = create_text_dataset(file, 2, context=8, usage=usage, shuffle=False)
        targets = columns(part)[1]
        read += text_of(part, targets[targets != IGNORED])
    cut = int(0.9 * len(TEXT))
    assert read == TEXT[1:cut] + TEXT[cut + 1 :]  # the first token of each is not predicted


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


def test_links_out_of_the_folder_are_not_followed(tmp_path, file):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine, and nothing else\n")
    os.symlink(file, folder / "other.txt")
    os.symlink(tmp_path, folder / "linked")
    facts = create_text_dataset(folder, 1, context=4).source.facts
    assert set(facts["vocabulary"]) == set("mine, and nothing else\n")


# Order


def test_order_follows_seed_and_epoch(file):
    first, second, other = (create_text_dataset(file, 3, context=4, seed=seed) for seed in (1, 1, 2))
    epochs = [columns(first)[0] for _ in range(2)]
    assert np.array_equal(epochs[0], columns(second)[0]) and not np.array_equal(*epochs)
    assert not np.array_equal(epochs[0], columns(other)[0])
    second.source.begin_with_epoch(1)
    assert np.array_equal(epochs[1], columns(second)[0])
    in_order = columns(create_text_dataset(file, 3, context=4, shuffle=False))[0]
    assert sorted(map(bytes, epochs[0])) == sorted(map(bytes, in_order))


def test_shards_divide_the_blocks(file):
    parts = [columns(create_text_dataset(file, 4, context=4, seed=1, num_shards=3, shard_id=n))[1] for n in range(3)]
    complete = columns(create_text_dataset(file, 4, context=4, seed=1))[1]
    assert sorted(map(bytes, np.concatenate(parts))) == sorted(map(bytes, complete))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# Vocabularies


@pytest.mark.parametrize("level", ["characters", "bytes"])
def test_text_is_read_back_unchanged(tmp_path, level):
    text = "梯度累积 gradient — 微批次\r\n🙂 " * 9
    path = tmp_path / "中文.txt"
    path.write_bytes(text.encode())
    dataset = create_text_dataset(path, 1, context=len(text.encode()), level=level, shuffle=False)
    vocabulary = dataset.source.data.vocabulary
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.size == (256 if level == "bytes" else len(set(text)))
    shown = text_of(dataset, columns(dataset)[1][0][: dataset.source.facts["tokens"]])
    assert text[1:].startswith(shown) if level == "characters" else shown


def test_vocabulary_has_the_characters_of_both_splits(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a" * 90 + "b" * 10)
    assert create_text_dataset(path, 1, context=8).source.facts["vocabulary"] == "ab"


def test_vocabulary_of_a_trained_network_is_kept(file):
    characters = "".join(sorted(set(TEXT) | set("xyz")))
    dataset = create_text_dataset(file, 1, context=8, usage="test", vocabulary=characters)
    assert dataset.source.facts["vocabulary"] == characters
    with pytest.raises(DataError, match=r"text\.txt' can't be read by a trained network: .* of 3: '\\n' ' ' ','"):
        create_text_dataset(file, 1, context=8, vocabulary="abc")


def test_invalid_bytes_are_shown_as_such():
    assert Vocabulary("bytes").decode([0xE6, 0x41]) == "\ufffdA"


def test_unknown_character_between_known_ones_is_found():
    with pytest.raises(ValueError, match="'b'"):
        Vocabulary("characters", "ac").encode("abc")


# Fingerprints


def test_fingerprint_changes_with_any_token_block_and_vocabulary(file):
    def fingerprint(**options):
        return create_text_dataset(file, 1, **{"context": 8, **options}).source.fingerprint

    first = fingerprint()
    file.write_text(TEXT.replace("question", "Question", 1))
    changed = fingerprint()
    file.write_text(TEXT)
    more = "".join(sorted({*TEXT, "~"}))
    others = {
        fingerprint(context=9),
        fingerprint(usage="test"),
        fingerprint(vocabulary=more),
        fingerprint(level="bytes"),
    }
    assert fingerprint() == first and len({first, changed, *others}) == 6


# Mistakes


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        (b"\xff\xfe text in another encoding", {}, DataError, r"x\.txt' is not UTF-8: byte 0 is 0xff\. Use bytes as"),
        (b"", {}, DataError, r"has 0 tokens, too few"),
        (b"only a few words", {}, DataError, r"has 16 tokens, too few"),
        (
            b"a" * 99,
            {"batch_size": 4, "context": 30},
            ValueError,
            r"'batch_size' must be <= 3, the number of train blocks",
        ),
        (b"a" * 99, {"context": 0}, ValueError, r"'context' must be an int >= 1, but got 0"),
        (b"a" * 99, {"level": "words"}, ValueError, r"'level' must be one of \('characters', 'bytes'\)"),
        (b"a" * 99, {"usage": "valid"}, ValueError, r"'usage' must be one of \('train', 'test'\)"),
        (b"a" * 99, {"vocabulary": ""}, ValueError, r"'vocabulary' must have characters, and each once"),
        (b"a" * 99, {"vocabulary": "aba"}, ValueError, r"'vocabulary' must have characters, and each once"),
        (b"a" * 99, {"vocabulary": ["a"]}, TypeError, r"'vocabulary' must be a str, but got list"),
        (b"a" * 99, {"vocabulary": "a", "level": "bytes"}, ValueError, r"must be None with level='bytes'"),
        (b"a" * 99, {"num_shards": 9, "context": 30, "batch_size": 1}, ValueError, r"'num_shards' must be <= 3"),
    ],
)
def test_unusable_texts_and_arguments_are_rejected(tmp_path, content, options, error, message):
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(error, match=message):
        create_text_dataset(tmp_path / "x.txt", **{"batch_size": 2, **options})


def test_tokens_are_places_in_the_vocabulary(tmp_path):
    (tmp_path / "x.txt").write_text("abc" * 20)
    text = create_text_dataset(tmp_path, 2, context=6, shuffle=False, vocabulary="cab")
    tokens, _ = next(text.create_tuple_iterator(num_epochs=1))
    assert tokens.asnumpy()[0].tolist() == [1, 2, 0, 1, 2, 0]
    vocabulary = text.source.data.vocabulary
    assert vocabulary.decode([1, 2, 0]) == "abc" and vocabulary.decode([]) == ""


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


def test_missing_texts_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no' does not exist"):
        create_text_dataset(tmp_path / "no")
    with pytest.raises(FileNotFoundError, match=r"has no \.txt file"):
        create_text_dataset(tmp_path)


# The embedded sentences


def test_sentences_never_change():
    text = embedded.sentences()
    assert len(text) == 143_757 and text.count("\n") == embedded.SENTENCES
    assert text.startswith("The farmer needs the letter.\nThe tired farmer wants two boats at school.\n")


def test_verbs_agree_with_their_subjects():
    for sentence in embedded.sentences().splitlines()[:300]:
        words = sentence.lower().rstrip(".").split()
        subject = next(word for word in words[1:] if word.rstrip("s") in embedded._SUBJECTS)
        verbs = [word for word in words if word.rstrip("s") in embedded._VERBS]
        assert {verb.endswith("s") for verb in verbs} == {not subject.endswith("s")}, sentence


def test_entropy_is_that_of_the_choices():
    """Each choice can be read off from the text, so other choices give another sentence."""
    few = [f"{subject} {verb}" for subject in ("the teacher", "two teachers") for verb in ("x", "y")]
    assert len(set(few)) == 4
    # Of one sentence: number, adjective, noun, clause, verb, number and noun of the object, place.
    noun, clause = 1 + 1 + 0.5 * 3 + 3, 3 + 1 + 3
    bits = noun + 1 + 0.5 * clause + clause + 1 + 0.5 * 3
    assert embedded.entropy() == pytest.approx(bits * embedded.SENTENCES / len(embedded.sentences()), rel=0.01)
    assert not math.isclose(embedded.entropy(), bits / 40, rel_tol=0.01)
