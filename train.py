"""Train a network with gradient accumulation: python train.py [--data_path=./MNIST_Data]"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from itertools import islice
from typing import Any, Callable

from model_zoo import MODELS, OPTIMIZERS, RECIPES
from model_zoo.recipes import ADAPTIVE_LR, SGD_LR, TextSizes, by_dataset, filled_in
from ms_accum import __version__
from ms_accum.app import outputs
from ms_accum.app.flags import Parser, number, whole
from ms_accum.app.process import DATA, DISK, TRAINING, USAGE, Failure, begin, exit_code, run
from ms_accum.app.settings import Settings


def flags() -> Parser:
    """Return the flags, their ranges and their defaults."""
    parser = Parser(
        "Train LeNet5, an MLP, a ResNet or a GPT with gradient accumulation.",
        finish=lambda values: outputs.with_output_dir(Settings.from_flags(filled_in(values))),
        resumed=outputs.flags_of_resumed_run,
        usage="%(prog)s [--data_path PATH] [flags]",
    )
    add = parser.add_argument_group("data and model").add_argument
    text = "folder of MNIST or CIFAR-10, or a text file or a folder of .txt files; without it embedded data are used"
    add("--data_path", metavar="PATH", help=text)
    text = "download the data set into --data_path first, from URL if it is given"
    add("--download", nargs="?", const=True, metavar="URL", help=text)
    text = "the data set (default: what --model takes; without --model mnist with --data_path, else digits)"
    add("--dataset", choices=tuple(RECIPES), help=text)
    add("--model", choices=tuple(MODELS), help=f"the network (default: {by_dataset('model')})")
    text = f"passes over the training data (default: {by_dataset('epochs')})"
    add("--epochs", "--epoch_size", type=whole(1), metavar="N", help=text)
    add("--max_updates", type=whole(1), metavar="N", help="end after this number of updates, also inside an epoch")
    text = "seed of the weights, the order of the rows and the random crops (default: 1)"
    add("--seed", type=whole(0, 2**32 - 1), default=1, metavar="N", help=text)
    parser.add_text({name: by_dataset(name) for name in TextSizes._fields})
    parser.add_window(by_dataset("batch_size"))
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=OPTIMIZERS, help=f"the optimizer (default: {by_dataset('optimizer')})")
    other = f"{ADAPTIVE_LR} for adam and adamw, {SGD_LR} for momentum and sgd"
    text = f"learning rate (default: {by_dataset('lr')}; with another kind of optimizer {other})"
    add("--lr", type=number(0, above=True), metavar="X", help=text)
    add("--momentum", type=number(0), metavar="X", help="momentum of momentum and sgd (default: 0.9)")
    text = f"weight decay (default: {by_dataset('weight_decay')}; with adam and adamw 0)"
    add("--weight_decay", type=number(0), metavar="X", help=text)
    text = "decay of the second moment of adam and adamw (default: 0.999)"
    add("--beta2", type=number(0, above=True, below=1 - 2**-25), metavar="X", help=text)  # in float32
    text = "ZeRO stage with several processes: 1 shards the state of the optimizer, 2 also the accumulators"
    add("--zero", type=int, choices=(1, 2), help=text)
    parser.add_rates()
    parser.add_numerics()
    parser.add_evaluations()
    parser.add_output()
    parser.add_states()
    parser.add_program()
    return parser


if __name__ == "__main__":
    begin(flags(), __version__)  # wrong flags end the program here: importing MindSpore takes seconds

import mindspore as ms
from mindspore import nn, ops

from model_zoo import DOWNLOADS, DataError, make_optimizer
from ms_accum import Ema, GradientAccumulation, Group, ZeroOptimizer, tune_cpu, verify
from ms_accum.app import plan, steps
from ms_accum.app.rates import rate_by_update
from ms_accum.app.tasks import Task, task_of
from ms_accum.engine.loss_scale import mixed, scaler_of
from ms_accum.network.runtime import keep_cpu_defaults
from ms_accum.ranks.group import comes_first


def download(settings: Settings) -> None:
    """Download the data set in one process; the others wait in `join`, with a timeout of ten minutes."""
    if settings.download is not None and comes_first():
        url: Any = {} if settings.download is True else {"url": settings.download}
        with exit_code(USAGE, TypeError, ValueError, ImportError), exit_code(DATA, DataError, OSError):
            DOWNLOADS[settings.dataset](settings.data_path or "", **url)


def datasets(settings: Settings, task: Task, group: Group | None) -> tuple[Any, Any]:
    """Return the training split, in batches of one window or one micro-batch, and the test split."""
    rank, size = group or (0, 1)
    shard = {"num_shards": size, "shard_id": rank}
    # A DataError is also a ValueError: the inner context handles it first.
    with exit_code(USAGE, TypeError, ValueError), exit_code(DATA, DataError, OSError):
        train = task.data("train", settings.loaded_rows, seed=settings.seed, **shard)
        return train, task.data("test", task.test_rows(train), **shard)


def check_gradients(settings: Settings, task: Task, network: nn.Cell, train: Any) -> None:
    """Compare the gradient of the first window's micro-batches with that of one batch, and print the table."""
    micro_batches = settings.micro_batches
    batches = list(islice(train.create_tuple_iterator(num_epochs=1), 1 if settings.window_rows else micro_batches))
    window = tuple(ops.cat(column) for column in zip(*batches))
    rtol = 1e-3 if settings.amp == "off" else 0.05
    with exit_code(USAGE, ValueError):
        verification = verify(
            network, task.loss(), window, micro_batches, reduction=settings.reduction, weight=task.weight, rtol=rtol
        )
    print(verification)
    if not verification.ok:
        raise Failure("the gradients of micro-batches and of one large batch differ", TRAINING)


def build(settings: Settings, task: Task, train: Any) -> tuple[GradientAccumulation, nn.Cell, dict[str, str]]:
    """Return the driver, the network, and the settings made for the CPU runtime."""
    ms.set_seed(settings.seed)
    with exit_code(USAGE, ValueError), exit_code(DISK, OSError):
        network = mixed("train.py", task.network(train), settings.amp)
    runtime = tune_cpu(network) if settings.runtime == "tuned" else keep_cpu_defaults()
    make = partial(
        make_optimizer,
        settings.optimizer,
        lr=rate_by_update(settings.rates),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        beta2=settings.beta2,
    )
    parameters = network.trainable_params()
    optimizer = ZeroOptimizer(make, parameters) if settings.zero else make(parameters)
    with exit_code(USAGE, ValueError):
        model = GradientAccumulation(
            network,
            task.loss(),
            optimizer,
            weight=task.weight if settings.reduction == "mean" else None,
            reduction=settings.reduction,
            tail=settings.tail,
            clip_norm=settings.clip_norm,
            sync_every_micro_batch=settings.zero == 2,
            loss_scale=scaler_of(settings.loss_scale),
            nonfinite=settings.nonfinite,
            ema=None if settings.ema is None else Ema(settings.ema, warm_up=100),
        )
    return model, network, runtime


def trial(settings: Settings, rows: int) -> Callable[[], None]:
    """Train the first window of this run in micro-batches of `rows` rows, and evaluate one batch; return the former."""
    settings = settings.with_micro_batches_of(rows)
    steps.choose_device(settings.device_target)
    task = task_of(settings)
    train, test = datasets(settings, task, None)
    model, network, _ = build(settings, task, train)
    batch = next(train.create_tuple_iterator(num_epochs=1))
    window = partial(model.train_process, 1, [batch], **settings.window, report=(), ckpt_path=None)
    window()
    task.evaluate(network, [next(test.create_tuple_iterator(num_epochs=1))], None)
    return window


def main(settings: Settings) -> None:
    """Build and print the run, train, save, evaluate."""
    device = steps.choose_device(settings.device_target)
    download(settings)
    settings, group = steps.join(settings)
    plan.show_resumed_flags(settings)
    task = task_of(settings, steps.characters_of_resumed_run(settings))
    train, test = datasets(settings, task, group)
    settings = steps.with_planned_updates(settings, train)
    model, network, runtime = build(settings, task, train)
    if settings.verify:
        check_gradients(settings, task, network, train)
        return
    settings, search = steps.choose_micro_batch(settings, partial(trial, settings), __version__)
    settings = steps.make_folders(settings, group)
    if settings.debug:
        plan.show_runtime(runtime)
    plan.show_plan(settings, device, network, task.description(train), train.get_dataset_size(), search)
    evaluate_test = partial(task.evaluate, network, test, group)
    models = steps.Models(network, model, settings, task, steps.facts_of(__version__, train, test), group)
    start = time.perf_counter()
    result = steps.train(model, settings, train, models=models, evaluate=evaluate_test)
    plan.show_end(settings, time.perf_counter() - start, models.previous)
    plan.show_result(result)


if __name__ == "__main__":
    gc.freeze()  # MindSpore makes a full collection at each compilation, which would look at all that was imported
    sys.exit(run(main, flags()))
