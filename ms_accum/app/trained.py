"""A trained model: which network its file holds, on which data it was trained, and what its record contains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mindspore import nn

from model_zoo import MODELS, RECIPES, DataError
from model_zoo.recipes import EMBEDDED, TextSizes, dataset_for

from .._check import one_line
from ..saving.model_file import (
    CheckpointError,
    differences,
    load_model,
    load_parameters,
    read_record,
    sidecar,
)
from .process import CHECKPOINT, DATA, USAGE, Failure, exit_code
from .tasks import BYTES, Images, Result, Task, Text, result_in

Record = Mapping[str, Any]


class Trained(NamedTuple):
    """A trained model."""

    path: str
    model: str
    """The name of the model, one of `MODELS`."""
    dataset: str
    """The name of the data set, one of `RECIPES`."""
    record: Record | None
    task: Task
    """What it was trained for, on the data that are given now."""
    network: nn.Cell

    @property
    def has_data(self) -> bool:
        """bool, whether there are data to evaluate on."""
        return self.dataset in EMBEDDED or self.task.path is not None

    @property
    def result(self) -> Result | None:
        """Optional[Result], of the evaluation after its training."""
        return None if self.record is None else result_in(self.record)

    def test_data(self) -> Any:
        """Return the batches of the test split, if they are what the model was trained for."""
        with exit_code(USAGE, TypeError, ValueError), exit_code(DATA, DataError, OSError):
            test = self.task.data("test", self.task.test_rows(None))
        for name in self.task.must_agree if self.record is not None else ():
            facts, record = test.source.facts, self.record
            if facts[name] != record[name]:  # type: ignore[index]
                fault = f"{name} {facts[name]}, and the model was trained with {record[name]}"  # type: ignore[index]
                raise Failure(f"the test images of {self.task.path or 'the digits'} have {fault}", DATA)
        return test

    def is_on_same_data(self, test: Any) -> bool:
        """Return whether the result in the record is that on this test split."""
        return self.record is not None and bool(self.record["test_data"] == test.source.facts["data"])


def load(path: str, *, model: str | None, data_path: str | None, needs_data: bool = True) -> Trained:
    """Return the model of a file.

    Args:
        path (str): the file.
        model (Optional[str]): its model; ``None`` for the one that its record names, or that fits.
        data_path (Optional[str]): the data to evaluate on; ``None`` for embedded ones.
        needs_data (bool): whether it is to be evaluated. Default: ``True``.
    """
    with exit_code(CHECKPOINT, CheckpointError, OSError):
        record = read_record(path)
        if record is not None:
            _check_names(path, record)
        name = model or (record["model"] if record else _model_of(path))
        if MODELS[name].takes_text:
            text, network = _text(path, name, record, data_path)
        else:
            text, network = None, MODELS[name].make()
        load_model(network, path)
    dataset = _dataset_of(record, name, data_path, needs_data)
    return Trained(path, name, dataset, record, text or Images(dataset, name, data_path), network)


def _check_names(path: str, record: Record) -> None:
    for field, known in (("model", MODELS), ("dataset", RECIPES)):
        if record[field] not in known:
            fault = f"'{path}' is of the {field} '{record[field]}', and eval.py has {', '.join(known)}"
            raise CheckpointError(fault)
    is_text = "vocabulary" in record
    if MODELS[record["model"]].takes_text != is_text or (RECIPES[record["dataset"]].text is not None) != is_text:
        raise CheckpointError(f"The record of '{path}' can't be used: its model, its data set and its fields differ.")


def _model_of(path: str) -> str:
    """Return the name of the model whose parameters a checkpoint holds."""
    parameters = load_parameters(path)
    for name, entry in MODELS.items():
        if not entry.takes_text and not differences(entry.make(), parameters):
            return name
    first = ", ".join(f"{one_line(name)} {tuple(p.shape)}" for name, p in list(parameters.items())[:3])
    raise CheckpointError(f"'{path}' does not match any of {', '.join(MODELS)}: it holds {first}, ...")


def _text(path: str, model: str, record: Record | None, data_path: str | None) -> tuple[Text | None, nn.Cell]:
    """Return the task and the network of a model of text, of the sizes in its record."""
    if record is None or "vocabulary" not in record:
        remedy = f"keep '{sidecar(path)}' beside it" if path.endswith(".ckpt") else "train it again"
        raise CheckpointError(f"'{path}' has no record of a text, so its vocabulary is not known: {remedy}.")
    characters = record["vocabulary"]
    tokens = 256 if record["level"] == BYTES else len(characters)
    _check_sizes(path, record, tokens)
    sizes = TextSizes(**{name: record[name] for name in ("context", "layers", "width", "heads")})
    sizes = sizes._replace(vocabulary=record["level"])
    task = Text(model, data_path, sizes, untied_head=record["untied_head"], characters=characters or None)
    with exit_code(CHECKPOINT, ValueError):
        return task, task.network_for(tokens)


def _check_sizes(path: str, record: Record, tokens: int) -> None:
    """Reject sizes that are not those of the parameters: a crafted record could make a network of any size."""
    parameters = load_parameters(path)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    blocks = {name[len("blocks.") :].partition(".")[0] for name in shapes if name.startswith("blocks.")}
    expected = {
        "embedding.embedding_table": (tokens, record["width"]),
        "position.embedding_table": (record["context"], record["width"]),
    }
    if any(shapes.get(name) != shape for name, shape in expected.items()) or len(blocks) != record["layers"]:
        raise CheckpointError(f"The record of '{path}' can't be used: its sizes are not those of the parameters.")


def _dataset_of(record: Record | None, model: str, data_path: str | None, needs_data: bool) -> str:
    """Return the data set to evaluate on: the one that the model was trained on, if that is recorded."""
    if record is None:
        return dataset_for(model, data_path)
    dataset: str = record["dataset"]
    if dataset in EMBEDDED and data_path is not None:
        raise Failure(f"argument --data_path: the model was trained on the embedded {dataset}; leave it out", USAGE)
    if dataset not in EMBEDDED and data_path is None and needs_data:
        kind = "the text" if RECIPES[dataset].text else f"the folder of {dataset}"
        raise Failure(f"argument --data_path: must be given, {kind}: the model was trained on it", USAGE)
    return dataset
