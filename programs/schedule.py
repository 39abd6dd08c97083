"""The length of a run, and the learning rate of each of its updates."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ms_accum.engine.ends import planned


def length_of(args: argparse.Namespace, batches: int) -> tuple[int, int]:
    """Return the epochs and the updates of a run with so many micro-batches in an epoch."""
    epochs = args.epochs or 1
    updates = planned("train.py", batches, args.mini_steps, args.tail, epochs) or 0
    while args.epochs is None and updates < args.max_updates:
        epochs += 1
        updates = planned("train.py", batches, args.mini_steps, args.tail, epochs) or 0
    if args.max_updates is None:
        return epochs, updates
    return epochs + (args.epochs is None), min(updates, args.max_updates)  # one to spare: a skipped window is no update


def learning_rate(args: argparse.Namespace, updates: int) -> Any:
    """Return the optimizer's `learning_rate`: a number, or a list with one number for each update."""
    if args.lr_decay == "none" and not args.warmup_updates:
        return args.lr
    lowest = (args.min_lr or 0.0) / args.lr
    return [args.lr * _part(args, update, updates, lowest) for update in range(updates)]


def _part(args: argparse.Namespace, update: int, updates: int, lowest: float) -> float:
    """Return the part of the rate that an update has: it grows first, and may fall then."""
    if update < args.warmup_updates:
        return (update + 1) / args.warmup_updates
    progress = (update - args.warmup_updates) / max(1, updates - args.warmup_updates)
    part = {"none": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[args.lr_decay]
    return lowest + (1 - lowest) * part
