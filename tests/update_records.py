"""Helpers for tests of what is called after each update."""

from __future__ import annotations

from ms_accum import UpdateRecord
from ms_accum.training.callbacks import Callbacks, RunArguments


def record(update=1, *, epoch=1, loss=0.5, skipped=False, **others):
    norm = float("nan") if skipped else 1.5
    values = {"step": update, "lr": 0.25, "grad_norm": norm, "samples": 128, "seconds": 0.125, **others}
    return UpdateRecord(epoch=epoch, update=update, loss=loss, skipped=skipped, **values)


def facts_of(**facts):
    numbers = {"batch_num": 1, "cur_step_num": 0, "cur_epoch_num": 1, "epoch_num": 1, "initial_epoch": 0}
    return RunArguments({**numbers, **facts})


def tell(reporter, *records, updates=None, **facts):
    """Do what the driver does."""
    with Callbacks([reporter], facts_of(**facts)) as calls:
        calls("on_train_begin", planned=updates)
        for entry in records:
            calls.step_end(entry)
