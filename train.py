"""Train LeNet5 or the MLP with gradient accumulation: python train.py [--data_path=./MNIST_Data]"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import mindspore as ms
from mindspore import nn

from model_zoo import DEFAULT_URL, MODELS, DataError, create_dataset, download_mnist
from ms_accum import GradientAccumulation, evaluate, tune_cpu, updates_per_epoch
from ms_accum.checkpoint import check_folder, check_name, save_model
from ms_accum.program import (
    DATA,
    DISK,
    USAGE,
    Failure,
    Parser,
    Signals,
    choose_device,
    exit_code,
    number,
    quiet,
    run,
    show_accuracy,
    show_runtime,
    whole,
)
from ms_accum.report import MetricsFile, progress

# MNIST: the recipe of the r1.0 tutorial. The embedded digits are 40 times fewer and get one of their own.
RECIPES = {"mnist": {"epochs": 10, "lr": 0.01}, "digits": {"epochs": 25, "lr": 0.04}}
ADAPTIVE_LR = 0.001
EVAL_BATCH = 100
TAILS = {"flush": "a shorter last window", "carry": "a window that the next epoch goes on with", "drop": "no window"}


def flags() -> Parser:
    """Return the flags, their ranges and their defaults."""
    parser = Parser("Train LeNet5 or the MLP on MNIST, or on the embedded digits, with gradient accumulation.")
    add = parser.add_argument
    add("--data_path", metavar="DIR", help="folder of MNIST; without it the embedded digits are used")
    add("--download", nargs="?", const=DEFAULT_URL, metavar="URL", help="fetch MNIST into --data_path first")
    add("--dataset", choices=("mnist", "digits"), help="default: mnist with --data_path, digits without")
    add("--model", choices=tuple(MODELS), default="lenet5", help="default: %(default)s")
    add("--device_target", choices=("auto", "CPU", "GPU", "Ascend"), default="auto", help="default: %(default)s")
    add("--epochs", "--epoch_size", type=whole(1), metavar="N", help="default: 10 on mnist, 25 on digits")
    add("--batch_size", type=whole(1), default=32, metavar="N", help="rows of a micro-batch, default: %(default)s")
    names = ("--mini_steps", "--accumulate_step", "--gradient_accumulation_steps")
    add(*names, type=whole(1), default=4, metavar="N", help="micro-batches in a window, default: %(default)s")
    add("--reduction", choices=("mean", "sum"), default="mean", help="of a window's gradients, default: %(default)s")
    what = "what becomes of a last, shorter window, default: %(default)s"
    add("--tail", choices=tuple(TAILS), default="flush", help=what)
    add("--clip_norm", type=number(0, above=True), metavar="X", help="bound of the window's gradient, default: none")
    add("--optimizer", choices=("momentum", "sgd", "adam", "adamw"), default="momentum", help="default: %(default)s")
    add(
        "--lr",
        type=number(0, above=True),
        metavar="X",
        help=f"default: 0.01 on mnist, 0.04 on digits, {ADAPTIVE_LR} with adam and adamw",
    )
    add("--momentum", type=number(0), metavar="X", help="default: 0.9, for momentum and sgd")
    add("--weight_decay", type=number(0), default=0.0, metavar="X", help="default: %(default)s")
    add("--runtime", choices=("tuned", "default"), default="tuned", help="of MindSpore on CPU, default: %(default)s")
    add(
        "--seed",
        type=whole(0, 2**32 - 1),
        default=1,
        metavar="N",
        help="of weights and data order, default: %(default)s",
    )
    add("--output_dir", default=".", metavar="DIR", help="for the checkpoint and metrics.jsonl, default: here")
    add("--ckpt_path", metavar="FILE", help="default: gradient_accumulation.ckpt in --output_dir")
    return parser


def resolve(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other flags, and refuse flags that contradict each other."""
    args.dataset = args.dataset or ("digits" if args.data_path is None else "mnist")
    if args.dataset == "mnist" and args.data_path is None:
        raise Failure("argument --data_path: must be given for mnist; --download fetches it there", USAGE)
    if args.download and args.data_path is None:
        raise Failure("argument --download: needs --data_path, the folder to fetch MNIST into", USAGE)
    if args.dataset == "digits" and (args.data_path is not None or args.download):
        raise Failure("argument --dataset: digits are embedded; --data_path and --download are for mnist", USAGE)
    adaptive = args.optimizer in ("adam", "adamw")
    if adaptive and args.momentum is not None:
        raise Failure(f"argument --momentum: {args.optimizer} has none", USAGE)
    recipe = RECIPES[args.dataset]
    args.epochs = args.epochs or recipe["epochs"]
    args.lr = args.lr or (ADAPTIVE_LR if adaptive else recipe["lr"])
    args.momentum = 0.9 if args.momentum is None else args.momentum
    args.ckpt_path = args.ckpt_path or os.path.join(args.output_dir, "gradient_accumulation.ckpt")


def datasets(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the training and the test split."""
    size = MODELS[args.model].image_size
    # A DataError is a ValueError too: the inner one is asked first.
    with exit_code(USAGE, TypeError, ValueError), exit_code(DATA, DataError, OSError):
        if args.download:
            download_mnist(args.data_path, args.download)
        train = create_dataset(args.data_path, args.batch_size, usage="train", image_size=size, seed=args.seed)
        return train, create_dataset(args.data_path, EVAL_BATCH, usage="test", image_size=size)


def make_optimizer(args: argparse.Namespace, parameters: list) -> nn.Optimizer:
    """Return the optimizer that the flags name."""
    if args.optimizer == "adam":
        return nn.Adam(parameters, args.lr, weight_decay=args.weight_decay)
    if args.optimizer == "adamw":
        return nn.AdamWeightDecay(parameters, args.lr, weight_decay=args.weight_decay)
    kind = nn.SGD if args.optimizer == "sgd" else nn.Momentum
    return kind(parameters, learning_rate=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)


def show_plan(args: argparse.Namespace, device: str, network: nn.Cell, micro_batches: int, updates: int | None) -> None:
    """Print what follows from the flags, before anything is trained."""
    window = args.mini_steps
    tail = micro_batches - window * updates_per_epoch(micro_batches, window, "drop")
    parameters = sum(parameter.size for parameter in network.trainable_params())
    momentum = f", momentum {args.momentum:g}" if args.optimizer in ("momentum", "sgd") else ""
    decay = f", weight decay {args.weight_decay:g}" if args.weight_decay else ""
    clip = f", clip_norm {args.clip_norm:g}" if args.clip_norm else ""
    rows = (
        ("model", f"{args.model}, {parameters:,} parameters, on {device}"),
        ("data", f"{args.data_path or 'embedded digits'}, seed {args.seed}"),
        ("effective batch", f"{args.batch_size * window} = {args.batch_size} rows x {window} micro-batches"),
        ("an epoch", f"{micro_batches:,} micro-batches" + (f", {tail} of them in {TAILS[args.tail]}" if tail else "")),
        ("the run", f"{args.epochs} epoch{'s' * (args.epochs > 1)}, {updates:,} updates"),
        ("optimizer", f"{args.optimizer}, lr {args.lr:g}{momentum}{decay}{clip}, {args.reduction} over a window"),
        ("accumulators", f"{parameters * 4 / 2**20 if window > 1 else 0:.2f} MiB"),
    )
    for name, value in rows:
        print(f"{name:16} {value}")


def main(args: argparse.Namespace) -> None:
    """Build, say what was built, train, save, evaluate."""
    resolve(args)
    device = choose_device(args.device_target)
    train, test = datasets(args)
    ms.set_seed(args.seed)
    network = MODELS[args.model].make()
    settings = tune_cpu(network) if args.runtime == "tuned" else {}
    optimizer = make_optimizer(args, network.trainable_params())
    model = GradientAccumulation(
        network,
        nn.CrossEntropyLoss(),
        optimizer,
        reduction=args.reduction,
        tail=args.tail,
        clip_norm=args.clip_norm,
    )
    with exit_code(USAGE, ValueError):
        updates = model.planned_updates(args.epochs, train, args.mini_steps)
        check_name("train.py", args.ckpt_path)
    if updates == 0:
        raise Failure(f"argument --mini_steps: no window of {args.mini_steps} would fill in the whole run", USAGE)
    with exit_code(DISK, OSError, ValueError):
        os.makedirs(args.output_dir, exist_ok=True)
        os.makedirs(os.path.dirname(os.path.abspath(args.ckpt_path)), exist_ok=True)
        check_folder("train.py", args.ckpt_path)
    show_runtime(settings)
    show_plan(args, device, network, train.get_dataset_size(), updates)
    metrics = MetricsFile(os.path.join(args.output_dir, "metrics.jsonl"))
    model.train_process(args.epochs, train, args.mini_steps, report=(progress(), metrics, Signals()), ckpt_path=None)
    with exit_code(DISK, OSError), quiet():
        save_model(network, args.ckpt_path)
    show_accuracy(*evaluate(network, test))


if __name__ == "__main__":
    sys.exit(run(main, flags()))
