"""One of several ranks on one or several machines; it writes its results to FOLDER/RANK.json.

By msrun or ms_accum.launch: tests/ranks_machines.py FOLDER [other-data]. With `other-data` it also trains with other
inputs on the last rank.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mindspore import Tensor

from ms_accum import Checkpointer, Stopped, own_group, total
from ranks import N, adam_driver, driver_of, even_data, final_state_of, functional, network_of, train


def digest_of(model):
    return final_state_of(model)["digest"]


def trained(group, change=0.0):
    """Return the digest of a model; `change` is added to the inputs of the last rank."""
    model = driver_of(network_of(seed=1 + group.rank), clip_norm=0.5)
    data = even_data(group)
    if group.rank == group.size - 1:
        data = [(Tensor(x.asnumpy() + change), y) for x, y in data]
    train(model, data)
    return digest_of(model)


def resumed(group, folder):
    """With ZeRO-1: a complete run, and one that is asked to stop by the last rank in its second window and resumed."""
    data = even_data(group)
    complete = adam_driver(zero=True)
    train(complete, data)
    first = adam_driver(zero=True)
    stop = (lambda: first.updates == 1) if group.rank == group.size - 1 else None
    with contextlib.suppress(Stopped):
        train(first, data, checkpointer=Checkpointer(folder, stop=stop))
    total([0], group)  # no rank looks for the state before it is saved
    second = adam_driver(zero=True)
    train(second, data, checkpointer=Checkpointer(folder, keep=2, resume="auto"))
    return {"updates": [first.updates, second.updates], "digests": [digest_of(complete), digest_of(second)]}


def main(folder, *words):
    group = own_group()
    seen = {
        "rank": list(group),
        "driver": trained(group),
        **({"other data": trained(group, change=0.001)} if "other-data" in words else {}),
        "accumulator": functional(group, N)["digest"],
        "resumed": resumed(group, folder / "states"),
    }
    (folder / f"{group.rank}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
