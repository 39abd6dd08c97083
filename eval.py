"""Evaluate a checkpoint: python eval.py [--data_path=./MNIST_Data] --ckpt_path=./gradient_accumulation.ckpt"""

from __future__ import annotations

import argparse
import sys

from ms_accum.program.flags import Parser, place
from ms_accum.program.main import CHECKPOINT, DATA, USAGE, begin, exit_code, run
from ms_accum.zoo import MODELS


def flags() -> Parser:
    """Return the flags and their defaults."""
    parser = Parser("Evaluate a checkpoint of train.py on the test split.")
    parser.add_device()
    add = parser.add_argument
    add("--data_path", metavar="DIR", help="folder of the data set that the model was trained on; default: the digits")
    add("--ckpt_path", type=place, metavar="FILE", default="./gradient_accumulation.ckpt", help="default: %(default)s")
    add("--model", choices=tuple(MODELS), help="default: the one that the checkpoint fits")
    return parser


if __name__ == "__main__":
    begin(flags())  # wrong flags end the program here: importing MindSpore takes seconds

from mindspore import nn

from ms_accum import evaluate, tune_cpu
from ms_accum.fitting.runtime import keep_cpu_defaults
from ms_accum.program.plan import show_accuracy, show_runtime
from ms_accum.program.steps import choose_device
from ms_accum.saving.checkpoint import CheckpointError, differences, load_model, load_parameters
from ms_accum.zoo import DataError, create_dataset
from ms_accum.zoo.recipes import dataset_for


def model_of(path: str) -> str:
    """Return the name of the model whose parameters a checkpoint holds."""
    parameters = load_parameters(path)
    for name, entry in MODELS.items():
        if not differences(entry.make(), parameters):
            return name
    found = ", ".join(f"{name} {tuple(p.shape)}" for name, p in list(parameters.items())[:3])
    raise CheckpointError(f"'{path}' is of none of the architectures {', '.join(MODELS)}: it holds {found}, ...")


def main(args: argparse.Namespace) -> None:
    """Find the checkpoint's model, load it, count the right answers."""
    choose_device(args.device_target)
    with exit_code(CHECKPOINT, CheckpointError):
        name = args.model or model_of(args.ckpt_path)
        network: nn.Cell = MODELS[name].make()
        load_model(network, args.ckpt_path)
    show_runtime(tune_cpu(network) if args.runtime == "tuned" else keep_cpu_defaults())
    with exit_code(USAGE, TypeError, ValueError), exit_code(DATA, DataError, OSError):
        dataset, size = dataset_for(name, args.data_path), MODELS[name].image_size
        test = create_dataset(args.data_path, 100, usage="test", image_size=size, dataset=dataset)
    show_accuracy(*evaluate(network, test))


if __name__ == "__main__":
    sys.exit(run(main, flags()))
