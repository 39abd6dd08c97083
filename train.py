"""Train a network with gradient accumulation: python train.py [--data_path=./MNIST_Data]"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from typing import Any, Callable

if __name__ == "__main__" and hasattr(signal, "pthread_sigmask"):  # before other threads start: see ms_accum.signals
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

import mindspore as ms
from mindspore import nn

from model_zoo import DOWNLOADS, MODELS, OPTIMIZERS, RECIPES, DataError, create_dataset, make_optimizer
from model_zoo.recipes import ADAPTIVE, ADAPTIVE_LR, by_dataset, choose
from ms_accum import (
    Checkpointer,
    CheckpointError,
    GradientAccumulation,
    Group,
    Stopped,
    ZeroOptimizer,
    evaluate,
    find_micro_batch_size,
    own_group,
    tune_cpu,
)
from ms_accum.checkpoint import check_name, save_model
from ms_accum.metrics import evaluate_together
from ms_accum.parallel import comes_first, is_first
from ms_accum.plan import show_plan, words_of
from ms_accum.program import (
    AUTO,
    CHECKPOINT,
    DATA,
    DISK,
    USAGE,
    Failure,
    Parser,
    choose_device,
    exit_code,
    make_folders,
    memory,
    number,
    or_auto,
    place,
    quiet,
    run,
    show_accuracy,
    show_runtime,
    whole,
)
from ms_accum.report import MetricsFile, Opening, progress, say, show
from ms_accum.signals import SIGNALS, TERMINATED
from ms_accum.windows import TAILS

EVAL_BATCH, MINI_STEPS = 100, 4
# What a resumed run must have been started with, beside what the driver knows.
CONFIG = ("model", "dataset", "batch_size", "effective_batch", "lr", "momentum", "weight_decay", "seed")


def flags() -> Parser:
    """Return the flags, their ranges and their defaults."""
    parser = Parser("Train LeNet5, an MLP or ResNet-18 with gradient accumulation.")
    parser.add_device()
    add = parser.add_argument
    add("--data_path", metavar="DIR", help="folder of MNIST or CIFAR-10; without it the embedded digits are used")
    add("--download", nargs="?", const=True, metavar="URL", help="fetch the data set into --data_path first")
    add("--dataset", choices=tuple(RECIPES), help="default: what --model takes: mnist with --data_path, digits without")
    add("--model", choices=tuple(MODELS), help=f"default: {by_dataset('model')}")
    add("--epochs", "--epoch_size", type=whole(1), metavar="N", help=f"default: {by_dataset('epochs')}")
    what = f"rows of a micro-batch, default: {by_dataset('batch_size')}; auto: the most that fit into memory"
    add("--batch_size", type=or_auto(whole(1)), metavar="N|auto", help=what)
    names = ("--mini_steps", "--accumulate_step", "--gradient_accumulation_steps")
    add(*names, type=whole(1), metavar="N", help=f"micro-batches in a window, default: {MINI_STEPS}")
    what = "rows of a window, instead of --mini_steps; its last micro-batch may be shorter"
    add("--effective_batch", type=whole(1), metavar="N", help=what)
    what = "for --batch_size auto: what the process may take, such as 2GiB; default: what the device has"
    add("--memory_budget", type=memory, metavar="SIZE", help=what)
    add("--reduction", choices=("mean", "sum"), default="mean", help="of a window's gradients, default: %(default)s")
    what = "what becomes of a last, shorter window, default: %(default)s"
    add("--tail", choices=TAILS, default="flush", help=what)
    add("--clip_norm", type=number(0, above=True), metavar="X", help="bound of the window's gradient, default: none")
    add("--optimizer", choices=OPTIMIZERS, help=f"default: {by_dataset('optimizer')}")
    what = f"default: {by_dataset('lr')}, {ADAPTIVE_LR} with adam and adamw"
    add("--lr", type=number(0, above=True), metavar="X", help=what)
    add("--momentum", type=number(0), metavar="X", help="default: 0.9, for momentum and sgd")
    add("--weight_decay", type=number(0), metavar="X", help=f"default: {by_dataset('weight_decay')}; with adam 0")
    what = "what each of several processes keeps its part of only: 1, the optimizer's state; 2, the accumulators too"
    add("--zero", type=int, choices=(1, 2), help=what)
    add("--seed", type=whole(0, 2**32 - 1), default=1, metavar="N", help="of weights, order and crops, default: 1")
    add("--output_dir", type=place, default=".", metavar="DIR", help="for what is written, default: here")
    what = "the model: .ckpt or .safetensors, default: gradient_accumulation.ckpt in --output_dir"
    add("--ckpt_path", type=place, metavar="FILE", help=what)
    parser.add_states()
    return parser


def resolve(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other flags, and refuse flags that contradict each other."""
    with exit_code(USAGE, ValueError):
        args.dataset, args.model = choose(args.dataset, args.model, args.data_path, args.download)
    recipe = RECIPES[args.dataset]
    resolve_window(args, recipe.batch_size)
    if args.keep_best and not args.save_every:
        raise Failure("argument --keep_best: needs --save_every, the moments to choose from", USAGE)
    args.optimizer = args.optimizer or recipe.optimizer
    if args.optimizer in ADAPTIVE and args.momentum is not None:
        raise Failure(f"argument --momentum: {args.optimizer} has none", USAGE)
    lr, weight_decay = recipe.rates(args.optimizer)
    args.epochs = args.epochs or recipe.epochs
    args.lr = args.lr or lr
    args.weight_decay = weight_decay if args.weight_decay is None else args.weight_decay
    args.momentum = 0.9 if args.momentum is None else args.momentum
    args.ckpt_path = args.ckpt_path or os.path.join(args.output_dir, "gradient_accumulation.ckpt")
    args.models = [args.ckpt_path, "{}.best{}".format(*os.path.splitext(args.ckpt_path))][: 1 + args.keep_best]
    args.states = os.path.join(args.output_dir, "states")


def resolve_window(args: argparse.Namespace, batch_size: int) -> None:
    """Do so for the flags that say what a window is: micro-batches and their number, or the rows of all of them."""
    auto, whole_batch = args.batch_size == AUTO, args.effective_batch
    if auto and whole_batch is None:
        raise Failure("argument --batch_size: auto needs --effective_batch, the rows to split", USAGE)
    if args.memory_budget is not None and not auto:
        raise Failure("argument --memory_budget: is for --batch_size auto", USAGE)
    if whole_batch is None:
        args.batch_size = args.batch_size or batch_size
        args.mini_steps = args.mini_steps or MINI_STEPS
        return
    if args.mini_steps is not None:
        raise Failure("argument --mini_steps: follows from --effective_batch and --batch_size; leave it out", USAGE)
    if args.zero == 2:
        raise Failure("argument --zero: 2 needs --mini_steps, so that all processes have as many micro-batches", USAGE)
    if args.tail != "flush":
        raise Failure(f"argument --tail: each effective batch is a window, so there is nothing to {args.tail}", USAGE)
    args.batch_size = args.batch_size or min(batch_size, whole_batch)
    if not auto and args.batch_size > whole_batch:
        raise Failure(f"argument --batch_size: must be <= {whole_batch}, the --effective_batch", USAGE)


def download(args: argparse.Namespace) -> None:
    """Fetch the data set, once for all processes: the others wait in `join`, which gives them ten minutes."""
    if args.download is not None and comes_first():
        with exit_code(USAGE, TypeError, ValueError), exit_code(DATA, DataError, OSError):
            DOWNLOADS[args.dataset](args.data_path, **({} if args.download is True else {"url": args.download}))


def join(args: argparse.Namespace) -> None:
    """Join the other processes if a launcher started this one, and take this one's share of the effective batch."""
    args.group = own_group()
    ranks = args.group.size if args.group else 1
    if args.group is not None:
        if args.batch_size == AUTO:
            raise Failure("argument --batch_size: auto tries one process; give several the number it finds", USAGE)
        if args.tail == "carry":
            raise Failure("argument --tail: several processes save and stop between windows; take flush or drop", USAGE)
        if not is_first(args.group):
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # rank 0 speaks for all
    args.window_rows, rest = divmod(args.effective_batch or 0, ranks)
    if rest:
        raise Failure(f"argument --effective_batch: must be a multiple of {ranks}, the number of processes", USAGE)
    if args.window_rows and args.batch_size != AUTO:
        args.batch_size = min(args.batch_size, args.window_rows)


def split_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return how the driver is told what a window is."""
    if args.effective_batch is None:
        return {"mini_steps": args.mini_steps}
    whole_batch = args.batch_size == args.window_rows  # without accumulators
    return {"mini_steps": 1} if whole_batch else {"micro_batch_size": args.batch_size}


def datasets(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the training split, in batches of what one window or one micro-batch takes, and the test split."""
    which = {"dataset": args.dataset, "image_size": MODELS[args.model].image_size}
    group = args.group or Group(rank=0, size=1)
    part = {"num_shards": group.size, "shard_id": group.rank, **which}
    # A DataError is a ValueError too: the inner one is asked first.
    with exit_code(USAGE, TypeError, ValueError), exit_code(DATA, DataError, OSError):
        train = create_dataset(
            args.data_path, args.window_rows or args.batch_size, usage="train", seed=args.seed, **part
        )
        return train, create_dataset(args.data_path, EVAL_BATCH, usage="test", **part)


def build(args: argparse.Namespace) -> tuple[GradientAccumulation, nn.Cell, dict[str, str]]:
    """Return the driver and the network that the flags describe, and what was set for the CPU runtime."""
    ms.set_seed(args.seed)
    network = MODELS[args.model].make()
    settings = tune_cpu(network) if args.runtime == "tuned" else {}
    rates = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}

    def make(parameters: list) -> nn.Optimizer:
        return make_optimizer(args.optimizer, parameters, **rates)

    parameters = network.trainable_params()
    optimizer = ZeroOptimizer(make, parameters) if args.zero else make(parameters)
    # Not nn.CrossEntropyLoss: on CPU it alone takes as long as the rest of a small network, forward and backward.
    loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    options: dict[str, Any] = {"reduction": args.reduction, "tail": args.tail, "clip_norm": args.clip_norm}
    options["sync_every_micro_batch"] = args.zero == 2
    return GradientAccumulation(network, loss_fn, optimizer, **options), network, settings


def trial(args: argparse.Namespace, rows: int) -> None:
    """Train the first window of this very run in micro-batches of `rows` rows, and evaluate a batch."""
    args = argparse.Namespace(**{**vars(args), "batch_size": rows})
    choose_device(args.device_target)
    train, test = datasets(args)
    model, network, _ = build(args)
    window = next(train.create_tuple_iterator(num_epochs=1))
    model.train_process(1, [window], **split_of(args), report=(), ckpt_path=None)
    evaluate(network, [next(test.create_tuple_iterator(num_epochs=1))])


def find_batch_size(args: argparse.Namespace) -> str:
    """Replace "auto" by the largest micro-batch that fits, and return what was found in words."""
    with exit_code(CHECKPOINT, CheckpointError):
        before = Checkpointer(args.states, resume=args.resume).settings().get("batch_size")
        if before is not None and not (type(before) is int and before > 0):
            raise CheckpointError(f"the state to go on from has the batch_size {before!r}")
    if before and not args.allow_config_change:
        args.batch_size = before
        return f"{before} rows, as in the run that is resumed"
    with exit_code(USAGE, ValueError):
        found = find_micro_batch_size(partial(trial, args), args.effective_batch, memory_budget=args.memory_budget)
    args.batch_size = found.micro_batch_size
    return words_of(found, args.effective_batch, args.memory_budget)


def states_of(args: argparse.Namespace, train: Any, score: Callable[[], float]) -> Checkpointer:
    """Return what saves the run's state, and finds the one to go on from."""
    config = {name: getattr(args, name) for name in CONFIG}
    config |= {"rows": train.source.rows, "data": train.source.fingerprint}
    asked = {name: getattr(args, name) for name in ("keep", "resume", "allow_config_change")}
    best = score if args.keep_best else None
    return Checkpointer(args.states, **args.save_every, **asked, score=best, config=config, stop=SIGNALS.pending)


def score(updates: int, network: nn.Cell, args: argparse.Namespace, test: Any, best: float | None) -> float:
    """Evaluate in the middle of a run, say what came out, and save the model if it is the best so far."""
    correct, rows = evaluate_together(network, test, args.group)
    accuracy = correct / rows
    better = best is None or accuracy > best
    if better and is_first(args.group):
        with exit_code(DISK, OSError), quiet():
            save_model(network, args.models[1])
    say(f"accuracy: {accuracy:.4f} after {updates:,} updates{', the best so far' if better else ''}")
    return accuracy


def train_model(model: GradientAccumulation, network: nn.Cell, args: argparse.Namespace, train: Any, test: Any) -> None:
    """Train; a signal stops the run when its state is saved."""
    states = states_of(args, train, lambda: score(model.updates, network, args, test, states.best))
    metrics = MetricsFile(os.path.join(args.output_dir, "metrics.jsonl"), lambda: model.updates + model.skipped)
    report = (Opening("resumed", lambda: states.resumed), progress(), metrics)
    try:
        with SIGNALS.deferred(), exit_code(CHECKPOINT, CheckpointError), exit_code(DISK, OSError):
            model.train_process(
                args.epochs, train, **split_of(args), report=report, ckpt_path=None, checkpointer=states
            )
    except Stopped as stopped:
        code = SIGNALS.code or TERMINATED  # without a signal of its own a rank stops because another one got it
        raise Failure(f"{SIGNALS.words}, {stopped}; --resume goes on from there", code) from stopped


def main(args: argparse.Namespace) -> None:
    """Build, say what was built, train, save, evaluate."""
    resolve(args)
    device = choose_device(args.device_target)
    download(args)
    join(args)
    train, test = datasets(args)
    model, network, settings = build(args)
    with exit_code(USAGE, ValueError):
        updates = model.planned_updates(args.epochs, train, args.mini_steps)
        check_name("train.py", *args.models)
    if updates == 0:
        raise Failure(f"argument --mini_steps: no window of {args.mini_steps} would fill in the whole run", USAGE)
    found = find_batch_size(args) if args.batch_size == AUTO else ""
    make_folders(args.output_dir, *args.models)
    show_runtime(settings)
    if found:
        show("micro-batch", found)
    show_plan(args, device, network, train.get_dataset_size(), updates)
    train_model(model, network, args, train, test)
    if is_first(args.group):
        with exit_code(DISK, OSError), quiet():
            save_model(network, args.ckpt_path)
    show_accuracy(*evaluate_together(network, test, args.group))


if __name__ == "__main__":
    sys.exit(run(main, flags()))
