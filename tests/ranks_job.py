"""One of several ranks that train together; it writes its results to FOLDER/RANK.json.

By msrun or ms_accum.launch: tests/ranks_job.py FOLDER. All that tests of several processes ask is tried in
one job: to form the group takes longer than most of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mindspore as ms

import ranks
import ranks_agreement
import ranks_apart
import ranks_coupled
import ranks_in_model
import ranks_in_step
import ranks_lengths
import ranks_terms
from ms_accum import own_group

if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE)  # MindSpore's default, in which ours are compiled
    group = own_group()
    rooms = {"at the end": ranks, "in step": ranks_in_step, "apart": ranks_apart, "in model": ranks_in_model}
    rooms |= {"coupled": ranks_coupled, "agreement": ranks_agreement, "terms": ranks_terms, "lengths": ranks_lengths}
    seen = {"rank": [group.rank, group.size], **{name: room.run_scenarios(group) for name, room in rooms.items()}}
    (Path(sys.argv[1]) / f"{group.rank}.json").write_text(json.dumps(seen), encoding="utf-8")
