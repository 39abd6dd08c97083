"""How good is a network?"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.train import Loss, names

from .. import _check
from ..engine.config import WindowConfig
from ..engine.ema import averaged
from ..loss.known_losses import loss_among, runnable
from ..loss.objective import Objective
from ..loss.terms import Terms, terms_of
from ..network.compiled import Compiled, call, check_compile, compiled
from ..network.private import get_metrics
from ..network.runtime import tune
from ..network.training_mode import training_mode
from ..ranks.group import broadcast_number, total
from .callbacks import UNKNOWN, Callbacks
from .data import ONCE_ONLY, Data, restoring_generators
from .step import Step

_OWNER = "train_process"


def evaluate(network: nn.Cell, dataset: Iterable, *, inputs: int = 1, compile: bool = True) -> tuple[int, int]:
    """Count the samples that `network` classifies correctly.

    Args:
        network (Cell): from images to one score per class. Its training mode is restored.
        dataset (Union[Dataset, Iterable]): batches of (image, label).
        inputs (int): the columns that the network gets; the next one is the label. Default: 1.
        compile (bool): whether the network runs as a compiled graph in PyNative mode too, MindSpore's default, which is
            several times faster. Default: ``True``.

    Returns:
        tuple[int, int], the number of right answers and the number of samples.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from model_zoo import LeNet5, create_dataset
        >>> from ms_accum import evaluate
        >>> correct, total = evaluate(LeNet5(), create_dataset(batch_size=60, usage="test"))
        >>> total
        360
    """
    correct = rows = 0
    tune("evaluate", network.get_parameters())
    scores_of = compiled("evaluate", network, check_compile("evaluate", compile))
    inputs = _check.positive_int("evaluate", "inputs", inputs)
    with training_mode(network, False):
        for columns in next(Data(dataset).epochs(1)):
            if len(columns) != inputs + 1:
                rule = f"one that yields {inputs + 1} columns, of which the network gets {inputs}"
                _check.raise_invalid(ValueError, "evaluate", "dataset", rule, len(columns), "Give 'inputs'.")
            guess, answer = np.argmax(scores_of(*columns[:inputs]).asnumpy(), axis=1), columns[inputs].asnumpy()
            if answer.shape != guess.shape:
                raise ValueError(f"For 'evaluate', labels must have the shape {guess.shape}, but got {answer.shape}.")
            correct += int(np.sum(guess == answer))
            rows += len(guess)
    return correct, rows


class _LossAndOutput(Compiled):
    """From a batch's columns to the loss, or the tuple of its terms, and the network's output.

    Args:
        network (Cell): the network.
        loss_fn (Union[Cell, Callable]): its loss.
        inputs (int): the columns that the network gets; the loss gets the others.
        terms (Optional[Terms]): the terms, if the loss has several.
        compiles (bool): whether it is compiled in PyNative mode.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any, inputs: int, terms: Terms | None, compiles: bool):
        super().__init__(_OWNER, compiles, network, loss_fn)
        self.network, self.loss_fn, self.inputs = network, runnable(loss_fn), inputs
        self.names: Any = () if terms is None else terms.names

    def construct(self, *columns: Any) -> Any:
        output = call(self.network, columns[: self.inputs])
        loss = call(self.loss_fn, (output, *columns[self.inputs :]))
        return (terms_of(_OWNER, self.names, loss) if self.names else loss), output


class _Means:
    """The means of an evaluation, of the loss or of its terms.

    Args:
        coefficients (dict): the factor of each term, by name.
        summing (bool): whether losses are sums, which are added as they are.
    """

    def __init__(self, coefficients: Mapping[str, float], summing: bool):
        self._coefficients, self._summing = coefficients, summing
        self._sums, self._divisors = dict.fromkeys(coefficients, 0.0), dict.fromkeys(coefficients, 0.0)

    def add(self, losses: Sequence[Tensor], divisors: tuple[float, ...]) -> float:
        """Add a batch, and return its loss."""
        loss = 0.0
        for (name, coefficient), term, divisor in zip(self._coefficients.items(), losses, divisors):
            if divisor:  # a mean over nothing is 0/0
                value = float(term.asnumpy())
                loss += coefficient * value
                self._sums[name] += value * (1.0 if self._summing else divisor)
                self._divisors[name] += divisor
        return loss

    @property
    def terms(self) -> dict[str, float]:
        """dict, the mean of each term over what it counts; not of those that count nothing."""
        return {name: self._sums[name] / divisor for name, divisor in self._divisors.items() if divisor}

    @property
    def loss(self) -> float:
        """float, the sum of the means times their coefficients; NaN if nothing counts."""
        means = self.terms
        return float(sum(self._coefficients[name] * mean for name, mean in means.items())) if means else math.nan


class Evaluation:
    """Evaluates with MindSpore's metrics, as `Model.fit` does.

    Args:
        objective (Objective): the network, its loss, and what that averages over.
        config (WindowConfig): has the average of the weights, which is evaluated, and the ranks: all get rank
            0's results, so that callbacks decide alike.
        dataset (Union[Dataset, Iterable]): batches of what the network and the loss take.
        metrics (Union[None, dict, set]): as for `mindspore.train.Model`: names, or names and Metrics.
        every (Optional[int]): updates from one evaluation to the next; None: at the end of each epoch.
        updates (Callable): returns the number of updates so far.
    """

    def __init__(
        self,
        objective: Objective,
        config: WindowConfig,
        dataset: Any,
        metrics: Any,
        every: int | None,
        updates: Callable[[], int],
    ):
        self._updates = updates
        self._ema = config.ema
        self.every = None if every is None else _check.positive_int(_OWNER, "eval_every", every)
        """Optional[int], updates from one evaluation to the next; None: at the end of each epoch."""
        try:
            self._metrics = get_metrics(metrics) or {}
        except KeyError as error:
            known = f"names of MindSpore's metrics ({', '.join(sorted(names()))})"
            raise ValueError(f"For '{_OWNER}', 'metrics' must be {known}, but got {metrics}.") from error
        if dataset is None:
            rule = f"given with '{'eval_every' if metrics is None else 'metrics'}'"
            _check.raise_invalid(ValueError, _OWNER, "valid_dataset", rule, None)
        self._objective, self._data, self._group = objective, Data(dataset, argument=_check.VALID), config.group
        network, loss_fn = objective.network, objective.loss_fn
        compiles = config.compiles
        self._cell: nn.Cell = objective.evaluated
        if loss_fn is not None:
            self._cell = _LossAndOutput(network, loss_fn, objective.inputs, objective.terms, compiles)
        self._run = self._cell if loss_fn is not None else compiled(_OWNER, self._cell, compiles)
        self._check_first_batch(dataset)

    def _check_first_batch(self, dataset: Any) -> None:
        """Reject a data set before the first epoch rather than after it; other iterators than generators are not read.

        Of such an iterator it is not known whether it starts anew.
        """
        if isinstance(dataset, Generator):
            _check.VALID.raise_invalid(ValueError, "one that can be read in each evaluation", "a generator", ONCE_ONLY)
        if isinstance(dataset, Iterator):
            return
        with restoring_generators():
            first = next(iter(next(self._data.epochs(1))), None)
        if first is None:
            _check.VALID.raise_invalid(ValueError, "one that yields batches", "none")
        self._objective.columns.check(_check.VALID, first)
        if self._metrics and self._objective.loss_fn is None:
            with training_mode(self._cell, False), restoring_generators():
                self._run_batch(first)
        self._objective.columns.ran()  # later errors have other causes

    def _run_batch(self, columns: tuple) -> tuple[Any, tuple]:
        """Return the loss of a batch, or its terms, and the network's output, if there is one."""
        results = self._run(*columns)
        if self._objective.loss_fn is not None:
            return results[0], (results[1],)
        if self._objective.terms is not None:  # a network that returns its terms
            results = (results,)
        output = tuple(results[1:2]) if isinstance(results, (tuple, list)) else ()
        if self._metrics and not output:
            rule, remedy = "None for a network that returns only its loss", "Return (loss, output), or give 'loss_fn'."
            _check.raise_invalid(ValueError, _OWNER, "metrics", rule, "some", remedy)
        return loss_among(results), output

    def __call__(self, callbacks: Callbacks, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the results by name, with ``"eval_loss"``; None if `stop` returned true on any of the ranks.

        Args:
            callbacks (Callbacks): those of the run.
            stop (Callable): returns whether the run is to stop; it is called before each batch.
        """
        for metric in self._metrics.values():
            metric.clear()
        evaluating = callbacks.evaluating(batch_num=self._data.batches or UNKNOWN, updates=self._updates())
        evaluating("on_eval_begin")
        evaluating("on_eval_epoch_begin")
        with training_mode(self._cell, False), averaged(self._ema):
            losses = self._mean_loss(evaluating, stop)
        (stopped,) = total([losses is None], self._group)
        if losses is None or stopped:
            return None
        evaluating("on_eval_epoch_end")
        results = {**{name: metric.eval() for name, metric in self._metrics.items()}, **losses}
        results = {name: broadcast_number(value, self._group) for name, value in results.items()}
        evaluating("on_eval_end", metrics=results, eval_results=results)
        if evaluating.stopping:
            callbacks.request_stop()
        return results

    def _mean_loss(self, callbacks: Callbacks, stop: Callable[[], bool]) -> dict[str, float] | None:
        """Update the metrics with all batches, and return the mean loss over what the loss averages over."""
        objective, terms = self._objective, self._objective.terms
        coefficients = {"loss": 1.0}
        if terms is not None:
            coefficients = dict(zip(terms.names, terms.coefficients(self._updates())))
        means, columns = _Means(coefficients, objective.summing), None
        for columns in next(self._data.epochs(1)):
            if stop():
                return None
            step = callbacks.arguments.cur_step_num + 1
            callbacks("on_eval_step_begin", cur_step_num=step, eval_dataset_element=columns)
            losses, output = self._run_batch(columns)
            labels = objective.labels(columns)
            counted = means.add((losses,) if terms is None else losses, objective.divisors(columns))
            loss = losses if terms is None else Tensor(counted, ms.float32)
            callbacks("on_eval_step_end", net_outputs=(loss, *output, *labels))
            for metric in self._metrics.values():
                metric.update(loss) if isinstance(metric, Loss) else metric.update(*output, *labels)
        if columns is None:
            _check.VALID.raise_invalid(ValueError, "one that yields batches in every evaluation", "none", ONCE_ONLY)
        named = {} if terms is None else {f"eval_{name}": value for name, value in means.terms.items()}
        return {**named, "eval_loss": means.loss}


def evaluation_of(step: Step, dataset: Any, metrics: Any, every: int | None) -> Evaluation | None:
    """Return what evaluates during a run; None if there is nothing to evaluate."""
    if dataset is None and metrics is None and every is None:
        return None
    return Evaluation(step.objective, step.config, dataset, metrics, every, lambda: step.updates)
