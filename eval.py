"""Evaluate a model of train.py: python eval.py [--data_path=./MNIST_Data] --ckpt_path=./gradient_accumulation.ckpt

To evaluate your own network on your own data, copy this file, and replace the record and what comes from `task`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from programs.command import run
from programs.flags import evaluation_flags


def main(argv: Sequence[str]) -> None:
    """Load a model, and evaluate it on the test split."""
    # Before the imports: wrong flags end the program here, and MindSpore takes seconds. The record beside the model has
    # its network, its data set and its sizes; flags replace them.
    args = evaluation_flags(argv)

    from ms_accum.saving.model_file import load_model
    from programs.command import show, use_device
    from programs.tasks import task_of, write_report

    use_device(args.device_target)

    # The network, and the data to evaluate it on: batches of (image, label) or (tokens, next tokens).
    task = task_of(args)
    network = task.network()
    load_model(network, args.ckpt_path)
    test = task.data("test")

    show("task", task.title)
    show("model", args.ckpt_path)
    show("data", f"{len(test):,} batches for tests")
    result = task.evaluate(network, test)
    if args.report is not None:
        show("report", write_report(args.report, network, test))
    print(f"============== {result} ==============")


if __name__ == "__main__":
    sys.exit(run(main))
