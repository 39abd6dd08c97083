"""Amounts of memory: reading and formatting."""

from __future__ import annotations

import pytest

from ms_accum.app import amounts


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 2**29),
        ("512 mib", 2**29),
        (" 3kB ", 3000),
        ("1TiB", 2**40),
        ("17", 17),
        ("17B", 17),
    ],
)
def test_text_is_converted_to_bytes(text, size):
    assert amounts.from_text(text) == size == amounts.amount("test", "budget", text)


@pytest.mark.parametrize(
    "text", ["", "GiB", "2G", "-1GiB", "1e9", "1,5GB", "0", "0.1B", "nan", "2GiB!", "٣GiB", "2 Gi B"]
)
def test_invalid_text_is_rejected(text):
    assert amounts.from_text(text) is None
    with pytest.raises(ValueError, match="For 'test', 'budget' must be an amount of memory above 0"):
        amounts.amount("test", "budget", text)


def test_number_is_taken_as_bytes():
    assert amounts.amount("test", "budget", 2**31) == 2**31


@pytest.mark.parametrize(
    ("size", "text"), [(2**31, "2 GiB"), (2**20, "1 MiB"), (600, "600 bytes"), (2**30 * 1.899, "1.899 GiB")]
)
def test_amount_is_formatted_with_four_digits(size, text):
    assert amounts.short(size) == text
