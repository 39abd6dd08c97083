"""Lightning's Trainer with `accumulate_grad_batches`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving import serve_cases
from torch_parts import Network, loader, loss_of, optimizer_of, result, schedule_of, weights
from torch_ranks import across_ranks, rank

from benchmarks.conformance.case import Case, Result

import lightning  # isort: skip  (torchvision's operator is declared by torch_parts)
from lightning.pytorch import callbacks  # isort: skip


def train(case: Case) -> Result:
    """Train; a stopped run is resumed from `save_checkpoint` with `ckpt_path`."""
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder, "stopped.ckpt"))
        module = Module(case)
        if case.stop_after:
            try:
                trainer_of(case, Stop(case.stop_after, saved)).fit(module, Resumable(case))
            except InterruptedError:
                pass
            taken, module = module.optimizer.taken, Module(case)
            trainer_of(case).fit(module, Resumable(case), ckpt_path=saved, weights_only=False)
            return Result(weights(module), taken + module.optimizer.taken)
        average = callbacks.EMAWeightAveraging(decay=case.average) if case.average else None
        validation = loader(case) if case.evaluates else None
        trainer_of(case, average).fit(module, loader(case, rank()), validation)
    # At the end of training the callback replaces the weights by their average.
    return result(module, module.optimizer, average=weights(module) if average else None, evaluated=module.evaluated)


class Module(lightning.LightningModule):
    """The network with its training step."""

    def __init__(self, case: Case):
        super().__init__()
        self.case, self.network, self.loss_of, self.evaluated = case, Network(case), loss_of(case), None

    def training_step(self, columns: Any, number: int) -> Any:
        """Return the loss of a micro-batch."""
        inputs, targets = columns
        return self.loss_of(self.network(inputs), targets)

    def validation_step(self, columns: Any, number: int) -> None:
        """Note the weights at the first evaluation."""
        if not self.trainer.sanity_checking and self.evaluated is None:
            self.evaluated = weights(self.network)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and the schedule, which is stepped with it."""
        self.optimizer = optimizer_of(self.case, self.network)
        schedule = {"scheduler": schedule_of(self.case, self.optimizer), "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": schedule}


class Resumable:
    """A loader with a state, as Lightning asks for where a run is resumed inside an epoch."""

    def __init__(self, case: Case):
        self.pieces, self.position = list(loader(case)), 0

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[Any]:
        for columns in self.pieces[self.position :]:
            self.position += 1
            yield columns
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position."""
        self.position = state["position"]


class Stop(callbacks.Callback):
    """Saves a checkpoint after a number of micro-batches, and stops."""

    def __init__(self, after: int, path: str):
        self.after, self.path = after, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        """Stop."""
        if number + 1 == self.after:
            trainer.save_checkpoint(self.path)
            raise InterruptedError


def trainer_of(case: Case, *more: Any) -> lightning.Trainer:
    """Return the trainer."""
    changing = dict(enumerate(case.windows))
    if len(set(case.windows)) > 1:
        more = (*more, callbacks.GradientAccumulationScheduler(scheduling=changing))
    return lightning.Trainer(
        max_epochs=case.epochs,
        accumulate_grad_batches=1 if len(set(case.windows)) > 1 else case.window,
        gradient_clip_val=case.clip,
        accelerator="cpu",
        devices=case.ranks,
        strategy="ddp" if case.ranks > 1 else "auto",
        use_distributed_sampler=False,
        callbacks=[callback for callback in more if callback is not None],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


if __name__ == "__main__":
    can = ["clip", "schedule", "ema", "nan", "own optimizer", "class weights", "N that changes", "float16", "two terms"]
    can += ["BatchNorm", "resume", "evaluation", "two ranks"]
    serve_cases(across_ranks(train, __file__), ["lightning", "torch"], can)
