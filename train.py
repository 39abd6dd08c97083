"""Train a network with gradient accumulation: python train.py [--data_path=./MNIST_Data]

To train your own network on your own data, copy this file and replace the lines that are marked with "yours": two data
sets of MindSpore, a Cell, its loss, and how it is evaluated. README shows the same without flags and folders.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from programs.command import run
from programs.flags import interval_of, learning_rate, length_of, mini_steps_of, training_flags, window_of


def main(argv: Sequence[str]) -> None:
    """Train, save and evaluate."""
    # Before the imports: wrong flags end the program here, and MindSpore takes seconds.
    args = training_flags(argv)  # yours: training_flags(argv, own=True), without --model and the like

    import mindspore as ms
    from mindspore.amp import DynamicLossScaler

    from model_zoo import make_optimizer
    from ms_accum import Checkpointer, Ema, GradientAccumulation, ZeroOptimizer, own_group
    from ms_accum.engine.ema import averaged
    from ms_accum.network.optimizers import LearningRate, kind_of
    from ms_accum.saving.model_file import save_model
    from programs.command import Signals, show, silence, use_device
    from programs.folder import open_folder, write_json
    from programs.metrics import Beginning, MetricsFile
    from programs.tasks import begin_with, download, facts_of, task_of

    device = use_device(args.device_target)
    download(args)  # yours: take it out
    group = own_group()  # of one process, unless a launcher has started several
    if group.rank != 0:
        silence()
    args.mini_steps = mini_steps_of(args, group.size)  # by --effective_batch_size it depends on the processes
    ms.set_seed(args.seed)

    # The data: micro-batches of (image, label) or (tokens, next tokens), a part of them for each rank. The network.
    task = task_of(args)  # yours: take it out
    train, test = task.data("train", args.batch_size, group), task.data("test")  # yours; `train` a shard for each rank
    network = task.network()  # yours; in mixed precision if --amp asks for it
    if args.init_from is not None and not args.resume:  # the state of a resumed run has its weights
        begin_with(network, args.init_from)

    # A run ends after so many epochs or updates. The learning rate is a number, or a list with one for each update.
    epochs, updates = length_of(args, len(train))
    rate = learning_rate(args, updates)

    def optimizer_of(parameters: list) -> Any:  # yours, for another optimizer
        options = {"momentum": args.momentum, "weight_decay": args.weight_decay, "beta2": args.beta2}
        return make_optimizer(args.optimizer, parameters, lr=rate, **options)

    parameters = network.trainable_params()
    optimizer = ZeroOptimizer(optimizer_of, parameters) if args.zero else optimizer_of(parameters)
    model = GradientAccumulation(
        network,
        task.loss,  # yours: loss(output, label)
        optimizer,
        weight=task.weight,  # yours: what a micro-batch counts for, a function of its columns; None for its rows
        tail=args.tail,  # what becomes of a last, shorter window
        clip_norm=args.clip_norm,  # of the gradient of a window
        loss_scale=DynamicLossScaler(2.0**16, 2, 2000) if args.amp in ("O1", "O2", "O3") else None,
        ema=Ema(args.ema, warm_up=100) if args.ema is not None else None,
        sync_every_micro_batch=args.zero == 2,
    )

    folder = open_folder(args, group)  # from here on there are files
    show("task", task.title)  # yours
    show("model", f"{sum(p.size for p in parameters):,} parameters, on {device}, seed {args.seed}")
    show("window", window_of(args, group.size))
    show("optimizer", f"{kind_of(optimizer)}, learning rate at first {LearningRate(optimizer)():g}")
    show("run", f"epochs {epochs}, updates {f'{updates:,}' if updates else 'unknown'}, in {folder.path}")

    # The training state, of a window's end: weights, optimizer, the position in the data. A resumed run ends with the
    # bytes of one that did not stop. After the first Ctrl-C, SIGTERM or SIGHUP the run saves its state and stops.
    signals = Signals()
    states = Checkpointer(
        folder.states,
        **interval_of(args.save_every),
        resume="auto" if args.resume else None,
        # What must be equal in a resumed run: flags, the length of a schedule, and facts about the data (yours).
        config={**args.fixed, "updates": updates if isinstance(rate, list) else None, **facts_of(train)},
        stop=signals.received,
    )
    with signals:
        model.train_process(
            epochs,
            train,
            args.mini_steps,  # one update for so many micro-batches
            window_weight=args.window_weight,  # or for micro-batches that count for so much
            max_updates=args.max_updates,
            callbacks=[Beginning(states, folder, args.saved), MetricsFile(folder.metrics, writes=folder.writes)],
            valid_dataset=test,
            metrics=task.metrics,  # yours: MindSpore's, such as {"acc"}
            eval_every=args.eval_every,
            ckpt_path=folder.model,
            checkpointer=states,
        )
        # The model is saved by now. With --ema the one that is saved and evaluated has the average of the weights.
        with averaged(model.ema):
            if folder.writes:
                save_model(network, folder.model)
                write_json(f"{folder.model}.json", task.record)  # yours: take it out, if you do not use eval.py

    with averaged(model.ema):
        result = task.evaluate(network, test)  # yours
    show("model file", folder.model)
    print(f"============== {result} ==============")


if __name__ == "__main__":
    sys.exit(run(main))
