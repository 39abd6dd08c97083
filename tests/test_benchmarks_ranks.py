"""The benchmark of several ranks runs."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import ranks

pytestmark = pytest.mark.several


@pytest.mark.parametrize(
    ("option", "value"), [("contenders", ["torch"]), ("networks", ["resnet"]), ("windows", [1, 4])]
)
def test_unsupported_options_are_rejected(option, value):
    options = dict.fromkeys(("networks", "windows", "contenders", "rounds", "short"))
    with pytest.raises(ValueError, match=f"--{option}"):
        ranks.run(Namespace(**{**options, option: value}))
