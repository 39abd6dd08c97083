"""A published recipe has its published loss, whatever the micro-batches are."""

from __future__ import annotations

import os

import pytest

from ms_accum.app.process import OK
from ms_accum.saving.model_file import read_record
from programs import ROOT, lines_of, train

TEXT = os.environ.get("SHAKESPEARE_DATA", "")
CONFIG = f"--config={ROOT / 'configs' / 'shakespeare_gpt.yaml'}"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.isfile(TEXT), reason="SHAKESPEARE_DATA does not name tinyshakespeare's text"),
]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def losses(folder, *argv, config=CONFIG):
    assert train(config, f"--data_path={TEXT}", f"--output_dir={folder}", "--eval_every=end", *argv) == OK
    return [line["loss"] for line in lines_of(folder) if "update" in line]


def test_splits_of_12_rows_have_the_same_curve():
    def curve(rows, *argv):
        flags = ("--effective_batch=12", f"--batch_size={rows}", "--max_updates=200", *argv)
        return losses(f"rows {rows}{''.join(argv)}", *flags, config="--config=recipe.yaml")

    recipe = (ROOT / "configs" / "shakespeare_gpt.yaml").read_text(encoding="utf-8")
    with open("recipe.yaml", "w", encoding="utf-8") as file:
        file.write(recipe.replace("mini_steps: 1\n", "").replace("batch_size: 12\n", ""))
    expected = curve(12)
    assert len(expected) == 200 and expected[-1] < 2.6 < expected[0]
    for rows in (6, 4, 3):  # 6 + 6, 4 + 4 + 4 and 3 + 3 + 3 + 3
        assert curve(rows) == pytest.approx(expected, abs=1e-3), rows
    assert curve(12, "--clip_norm=2") != pytest.approx(expected, abs=1e-1)  # the mutant: a bound of another norm


def test_nanogpt_recipe_reaches_its_loss():
    losses("out")
    record = read_record("out/gradient_accumulation.ckpt")
    assert record["loss"] <= 1.88 and record["predicted"] == 111_539 and record["updates"] == 2000
