"""What does a program say of a run before it begins?"""

from __future__ import annotations

import argparse

from mindspore import nn

from ._bytes import short
from ._parts import Part
from .batch_size import MicroBatch
from .report import show
from .windows import updates_per_epoch

_TAILS = {"flush": "a shorter last window", "carry": "a window that the next epoch goes on with", "drop": "no window"}


def show_plan(args: argparse.Namespace, device: str, network: nn.Cell, batches: int, updates: int | None) -> None:
    """Print what follows from the flags, before anything is trained."""
    effective_batch, epoch, window = _windows_of(args, batches)
    parameters = sum(parameter.size for parameter in network.trainable_params())
    momentum = f", momentum {args.momentum:g}" if args.optimizer in ("momentum", "sgd") else ""
    decay = f", weight decay {args.weight_decay:g}" if args.weight_decay else ""
    clip = f", clip_norm {args.clip_norm:g}" if args.clip_norm else ""
    lines = (
        ("model", f"{args.model}, {parameters:,} parameters, on {device}"),
        ("data", f"{args.data_path or 'embedded digits'}, seed {args.seed}"),
        ("effective batch", effective_batch),
        ("an epoch", epoch),
        ("the run", f"{args.epochs} epoch{'s' * (args.epochs > 1)}, {updates:,} updates"),
        ("optimizer", f"{args.optimizer}, lr {args.lr:g}{momentum}{decay}{clip}, {args.reduction} over a window"),
        ("accumulators", _accumulators(args, network, window)),
    )
    for name, value in lines:
        show(name, value)


def _accumulators(args: argparse.Namespace, network: nn.Cell, window: int) -> str:
    """Return what they take, which nobody has who is alone with windows of 1."""
    if window == 1 and not args.group:
        return "0.00 MiB"
    ranks = args.group.size if args.group and args.zero == 2 else 1
    elements = sum(Part(parameter, 0, ranks).size for parameter in network.trainable_params())
    return f"{elements * 4 / 2**20:.2f} MiB{' on each rank' if ranks > 1 else ''}"


def words_of(found: MicroBatch, effective_batch: int, budget: int | None) -> str:
    """Return which micro-batch was found, and how."""
    of_budget = f" of {short(budget)}" if budget else ""
    trials = len(found.trials)
    split = f"of {effective_batch}, {found.mini_steps} in a window"
    tried = f"{trials} trial{'s' * (trials > 1)}"
    return f"{found.micro_batch_size} rows ({split}), {short(found.peak)}{of_budget}, {tried}"


def _windows_of(args: argparse.Namespace, batches: int) -> tuple[str, str, int]:
    """Return in words what a window and an epoch are, and the micro-batches in a window."""
    ranks = args.group.size if args.group else 1
    times = f" x {ranks} ranks" if args.group else ""
    if args.effective_batch is None:
        window = args.mini_steps
        tail = batches - window * updates_per_epoch(batches, window, "drop")
        short_window = f", {tail} of them in {_TAILS[args.tail]}" if tail else ""
        even = f"{args.batch_size * window * ranks} = {args.batch_size} rows x {window} micro-batches{times}"
        return even, f"{batches:,} micro-batches{short_window}", window
    size, rows = args.window_rows, args.batch_size
    window = updates_per_epoch(size, rows)
    full = updates_per_epoch(size, rows, "drop") if rows <= size else 0
    rest = f" + {size - full * rows} rows" if full < window else ""
    split = f"{rows} rows x {full} micro-batches{rest}"
    split = f"({split}){times}" if rest and times else f"{split}{times}"
    return f"{args.effective_batch} = {split}", f"{batches:,} windows", window
