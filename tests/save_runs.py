"""Kill processes while they save, and look at what is left: python tests/save_runs.py FOLDER KILLS"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from mindspore import nn

from ms_accum import Checkpointer
from ms_accum.network.generators import random_state
from ms_accum.saving import training_state
from ms_accum.saving.files import remove_leftovers
from ms_accum.saving.model_file import CheckpointError, load_model, save_model
from ms_accum.training.data import Position

SIZE = 500
# Of a run that has only begun.
FACTS = {
    "updates": 0,
    "skipped": 0,
    "updated": False,
    "skips": 0,
    "at": dataclasses.asdict(Position()),
    "random": random_state(),
}


def save_for_ever(folder, network):
    """Save the model and a state with one file kept, again and again."""
    with Checkpointer(folder / "states") as states:
        while True:
            save_model(network, folder / "model.ckpt")
            state = training_state.capture({}, FACTS)
            states.save(training_state.TrainingState({"a": np.random.rand(SIZE, SIZE)}, state.metadata))


def faults(folder):
    """Return what of the two can't be loaded, and how much a killed save left."""
    bad = []
    for load in (lambda: load_model(nn.Dense(SIZE, SIZE), folder / "model.ckpt"), lambda: newest(folder)):
        try:
            load()
        except CheckpointError as error:
            bad.append(str(error))
    return bad, len(list(folder.glob("**/.saving-*")))


def newest(folder):
    """Read the newest state, which has to be whole: one that isn't may never get its name."""
    return training_state.read(str(max((folder / "states").glob("state-*"))))


def main(folder, kills):
    """Fork a child that saves, for each kill: MindSpore is imported once, and has started nothing yet."""
    network = nn.Dense(SIZE, SIZE)
    save_model(network, folder / "model.ckpt")
    with Checkpointer(folder / "states") as states:
        states.save(training_state.capture({}, FACTS))
    rng, bad, leftovers = random.Random(1), [], 0
    for _ in range(kills):
        child = os.fork()
        if not child:
            save_for_ever(folder, network)
        time.sleep(rng.uniform(0.02, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        errors, leftover_files = faults(folder)
        remove_leftovers(folder)
        bad += errors
        leftovers += bool(leftover_files)
    print(json.dumps({"kills": kills, "bad": bad, "leftovers": leftovers}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
