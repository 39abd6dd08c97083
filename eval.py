"""Evaluate a checkpoint: python eval.py [--data_path=./MNIST_Data] --ckpt_path=./gradient_accumulation.ckpt"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping
from typing import Any

from ms_accum import __version__
from ms_accum.app.flags import Parser, path
from ms_accum.app.process import CHECKPOINT, DATA, DISK, USAGE, Failure, begin, exit_code, run
from ms_accum.app.settings import ema_of
from ms_accum.zoo import MODELS


def flags() -> Parser:
    """Return the flags and their defaults."""
    parser = Parser("Evaluate a checkpoint of train.py on the test split.", finish=checked_flags)
    parser.add_program()
    add = parser.add_argument
    add("--data_path", metavar="DIR", help="folder of the data set that the model was trained on; none for the digits")
    add("--ckpt_path", type=path, metavar="FILE", default="./gradient_accumulation.ckpt", help="default: %(default)s")
    text = "evaluate the averaged weights that train.py --ema has written beside it"
    add("--use_ema", action="store_true", help=text)
    add("--model", choices=tuple(MODELS), help="default: the one that the checkpoint names, or fits")
    text = "also write DIR/report.html: accuracy by class, the confusion matrix, the most certain wrong answers"
    add("--report", type=path, metavar="DIR", help=text)
    return parser


def checked_flags(values: dict[str, Any]) -> argparse.Namespace:
    """Return the flags, if they suit this process."""
    sizes = ("MS_WORKER_NUM", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE")  # of a launcher, a rank table, mpirun
    if values["report"] is not None and any(os.environ.get(name, "1") != "1" for name in sizes):
        raise Failure("argument --report: needs a single process; start eval.py without a launcher", USAGE)
    return argparse.Namespace(**values)


if __name__ == "__main__":
    begin(flags(), __version__)  # wrong flags end the program here: importing MindSpore takes seconds

from mindspore import nn

from ms_accum import tune_cpu
from ms_accum._check import one_line
from ms_accum.app.plan import in_percent, show, show_accuracy, show_runtime
from ms_accum.app.report_images import Answers, ImageData, image_sections
from ms_accum.app.report_page import Subject, page, report_path, write_page
from ms_accum.app.series import FILE, Metrics, read
from ms_accum.app.steps import choose_device, versions_with
from ms_accum.network.runtime import keep_cpu_defaults
from ms_accum.saving.model_file import CheckpointError, differences, load_model, load_parameters, read_record
from ms_accum.training.evaluation import evaluate_seen
from ms_accum.zoo import DataError, create_dataset
from ms_accum.zoo.data.classes import class_names
from ms_accum.zoo.recipes import RECIPES, dataset_for

Record = Mapping[str, Any]


def load(args: argparse.Namespace) -> tuple[str, nn.Cell, Record | None]:
    """Return the name of the checkpoint's model, the network with its weights, and its record if it has one."""
    path = args.ckpt_path
    with exit_code(CHECKPOINT, CheckpointError, OSError):
        record = read_record(path)
        if record is not None:
            for field, known in (("model", MODELS), ("dataset", RECIPES)):
                if record[field] not in known:
                    fault = f"'{path}' is of the {field} '{record[field]}', and eval.py has {', '.join(known)}"
                    raise CheckpointError(fault)
        name = args.model or (record["model"] if record else model_of(path))
        network: nn.Cell = MODELS[name].make()
        load_model(network, path)
    return name, network, record


def model_of(path: str) -> str:
    """Return the name of the model whose parameters a checkpoint holds."""
    parameters = load_parameters(path)
    for name, entry in MODELS.items():
        if not differences(entry.make(), parameters):
            return name
    first = ", ".join(f"{one_line(name)} {tuple(p.shape)}" for name, p in list(parameters.items())[:3])
    raise CheckpointError(f"'{path}' is of none of the architectures {', '.join(MODELS)}: it holds {first}, ...")


def dataset_of(record: Record | None, model: str, data_path: str | None) -> str:
    """Return the data set to evaluate on: the one that the model was trained on, if that is recorded."""
    if record is None:
        return dataset_for(model, data_path)
    dataset = record["dataset"]
    if dataset == "digits" and data_path is not None:
        raise Failure("argument --data_path: the model was trained on the embedded digits; leave it out", USAGE)
    if dataset != "digits" and data_path is None:
        remedy = f"must be given, the folder of {dataset}: the model was trained on it"
        raise Failure(f"argument --data_path: {remedy}", USAGE)
    return dataset


def data_of(record: Record | None, dataset: str, model: str, data_path: str | None) -> Any:
    """Return the batches of the test split, if they are what the model was trained for."""
    size = MODELS[model].image_size
    with exit_code(USAGE, TypeError, ValueError), exit_code(DATA, DataError, OSError):
        test = create_dataset(data_path, 100, usage="test", image_size=size, dataset=dataset)
    if record is not None:
        for name in ("image_size", "channels", "classes", "mean", "std"):
            if test.source.facts[name] != record[name]:
                fault = f"{name} {test.source.facts[name]}, and the model was trained with {record[name]}"
                raise Failure(f"the test images of {data_path or 'the digits'} have {fault}", DATA)
    return test


def is_on_same_data(record: Record, test: Any) -> bool:
    """Return whether the accuracy in a record is that on these test images."""
    return bool(record["test_data"] == test.source.facts["data"])


def data_description(args: argparse.Namespace, record: Record | None, test: Any) -> str:
    """Return the test images in words."""
    facts = test.source.facts
    images = f"{facts['rows']:,} test images of {facts['image_size']}x{facts['image_size']}"
    dataset = f" ({record['dataset']})" if record and args.data_path else ""
    return f"{args.data_path or 'embedded digits'}{dataset}, {images}"


def show_subject(args: argparse.Namespace, model: str, record: Record | None, test: Any) -> None:
    """Print the model and the data."""
    show("file", args.ckpt_path)
    if record is None:
        show("model", f"{model}, because {'--model says so' if args.model else 'its parameters fit'}")
        show("data", data_description(args, record, test))
        show("record", "none: which data it was trained on is not known")
        return
    show("model", f"{model}, {record['updates']:,} updates, {record['optimizer']}, lr {record['lr']:g}")
    show("data", data_description(args, record, test))
    if record["total"]:
        other_data = "" if is_on_same_data(record, test) else " on other images"
        show("record", f"{in_percent(record['correct'], record['total'])}{other_data} after training")


def checked_report_path(folder: str) -> str:
    """Return the path of the report, if it can be written."""
    try:
        return report_path(folder)
    except (OSError, ValueError) as error:
        raise Failure(f"argument --report: {error}", DISK if isinstance(error, OSError) else USAGE) from error


def subject_of(args: argparse.Namespace, model: str, record: Record | None, test: Any) -> Subject:
    """Return the model, the data and the software for the report."""
    return Subject(
        path=args.ckpt_path,
        model=model,
        data=data_description(args, record, test),
        record=record,
        same_data=record is not None and is_on_same_data(record, test),
        versions=versions_with(__version__),
    )


def metrics_beside(path: str) -> Metrics | str:
    """Return the metrics of the run in whose folder a model is, or why there are none."""
    try:
        return read(os.path.dirname(path))
    except FileNotFoundError:
        return f"there is no {FILE} beside the model, as there is in the folder of a run"
    except (OSError, ValueError) as error:
        return str(error)


def write_report(path: str, subject: Subject, images: ImageData, answers: Answers) -> None:
    """Write the report."""
    with exit_code(DISK, OSError), exit_code(USAGE, ValueError):
        sections = image_sections(subject, images, answers)
        write_page(path, page(subject, sections, metrics_beside(subject.path)))
    show("report", path)


def main(args: argparse.Namespace) -> None:
    """Load the checkpoint's model, find its data, count the right answers, and write the report if it is wanted."""
    if args.use_ema:
        args.ckpt_path = ema_of(args.ckpt_path)
        if not os.path.isfile(args.ckpt_path):
            fault = f"there is no '{args.ckpt_path}'; train.py --ema 0.999 writes it"
            raise Failure(f"argument --use_ema: {fault}", CHECKPOINT)
    choose_device(args.device_target)
    model, network, record = load(args)
    dataset = dataset_of(record, model, args.data_path)
    test = data_of(record, dataset, model, args.data_path)
    report = None if args.report is None else checked_report_path(args.report)
    show_subject(args, model, record, test)
    show_runtime(tune_cpu(network) if args.runtime == "tuned" else keep_cpu_defaults())
    answers = Answers(test.source.facts["classes"])
    counts = evaluate_seen(network, test, answers.add if report else None)
    try:
        if report is not None:
            images = ImageData(class_names(dataset), test.source.facts["mean"], test.source.facts["std"])
            write_report(report, subject_of(args, model, record, test), images, answers)
    finally:
        show_accuracy(*counts)


if __name__ == "__main__":
    gc.freeze()  # MindSpore makes a full collection at each compilation, which would look at all that was imported
    sys.exit(run(main, flags()))
