"""The benchmark of several ranks runs."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import ranks
from benchmarks.contenders import Entry, start
from benchmarks.process import ContenderError
from benchmarks.ranks import APART

pytestmark = pytest.mark.several


@pytest.mark.slow
def test_failed_job_raises_error_with_launcher_message(tmp_path):
    entry = Entry("job", "mindspore", "ranks_job.py")
    flags = ("--ranks", "2", "--folder", str(tmp_path), "--network", "resnet", "--ways", APART)
    with pytest.raises(ContenderError, match="(?s)'job' died.*exit code 2"), start(entry, *flags):
        pass


@pytest.mark.parametrize(
    ("option", "value"), [("contenders", ["torch"]), ("networks", ["resnet"]), ("windows", [1, 4])]
)
def test_unsupported_options_are_rejected(option, value):
    options = dict.fromkeys(("networks", "windows", "contenders", "rounds", "short"))
    with pytest.raises(ValueError, match=f"--{option}"):
        ranks.run(Namespace(**{**options, option: value}))
