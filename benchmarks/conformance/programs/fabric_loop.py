"""Lightning Fabric: its documentation's example of gradient accumulation, where the loss is `...`: a mean over N here.

The example tests `iteration % N`, so that a window ends with the first micro-batch of an epoch.
"""

from __future__ import annotations

from dataclasses import replace

from serving import serve_cases
from torch.utils.data import DataLoader
from torch_parts import Network, loss_of, optimizer_of, result, schedule_of, tensors, weights
from torch_ranks import across_ranks

from benchmarks.conformance.case import Case, Result

from lightning.fabric import Fabric  # isort: skip  (torchvision's operators are declared by torch_parts)


def train(case: Case) -> Result:
    """Train by the example."""
    fabric = Fabric(accelerator="cpu", devices=case.ranks, strategy="ddp" if case.ranks > 1 else "auto")
    fabric.launch()
    network = Network(case)
    counted = optimizer_of(case, network)
    schedule = schedule_of(case, counted)
    model, optimizer = fabric.setup(network, counted)
    items = tensors(replace(case, ranks=1).micro_batches())
    loader = fabric.setup_dataloaders(DataLoader(items, batch_size=1, collate_fn=lambda only: only[0]))
    loss_function, evaluated = loss_of(case), None
    for size in case.windows:
        for iteration, (inputs, targets) in enumerate(loader):
            is_accumulating = iteration % size != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = loss_function(model(inputs), targets)
                fabric.backward(loss / size if case.reduction == "mean" else loss)
            if not is_accumulating:
                if case.clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=case.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        evaluated = weights(network) if evaluated is None else evaluated
    return result(network, counted, evaluated=evaluated)


if __name__ == "__main__":
    can = ["clip", "schedule", "nan", "own optimizer", "class weights", "N that changes", "float16", "two terms"]
    cannot = {"ema": "no average of the weights", "resume": "not tried: it saves what a user names"}
    serve_cases(
        across_ranks(train, __file__), ["lightning", "torch"], [*can, "BatchNorm", "evaluation", "two ranks"], cannot
    )
