"""Evaluate a checkpoint: python eval.py [--data_path=./MNIST_Data] --ckpt_path=./gradient_accumulation.ckpt"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from model_zoo import MODELS
from ms_accum import __version__
from ms_accum.app.flags import Parser, path
from ms_accum.app.process import CHECKPOINT, DISK, USAGE, Failure, begin, exit_code, run
from ms_accum.app.settings import ema_of


def flags() -> Parser:
    """Return the flags and their defaults."""
    parser = Parser(
        "Evaluate a checkpoint of train.py on the test split.",
        finish=checked_flags,
        usage="%(prog)s [--data_path PATH] [--ckpt_path FILE] [flags]",
    )
    add = parser.add_argument_group("model and data").add_argument
    text = "the model that train.py has written (default: %(default)s)"
    add("--ckpt_path", type=path, metavar="FILE", default="./gradient_accumulation.ckpt", help=text)
    text = "evaluate the averaged weights that train.py --ema has written beside it"
    add("--use_ema", action="store_true", help=text)
    text = "the network (default: the one in the model's record; without a record, the one that fits the parameters)"
    add("--model", choices=tuple(MODELS), help=text)
    add("--data_path", metavar="PATH", help="the data that the model was trained on; not for embedded data")
    add = parser.add_argument_group("output").add_argument
    text = "also write DIR/report.html: the results in detail, wrong answers or surprising lines, and the curves"
    add("--report", type=path, metavar="DIR", help=text)
    parser.add_sample()
    parser.add_program()
    return parser


def checked_flags(values: dict[str, Any]) -> argparse.Namespace:
    """Return the flags, if they suit this process."""
    sizes = ("MS_WORKER_NUM", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE")  # of a launcher, a rank table, mpirun
    if values["report"] is not None and any(os.environ.get(name, "1") != "1" for name in sizes):
        raise Failure("argument --report: needs a single process; start eval.py without a launcher", USAGE)
    for name in ("prompt", "temperature"):
        if values[name] is not None and values["sample"] is None:
            raise Failure(f"argument --{name}: needs --sample", USAGE)
    if values["prompt"] == "":
        raise Failure("argument --prompt: must not be empty", USAGE)
    if values["temperature"] is None:
        values["temperature"] = 0.8
    return argparse.Namespace(**values)


if __name__ == "__main__":
    begin(flags(), __version__)  # wrong flags end the program here: importing MindSpore takes seconds

from ms_accum import tune_cpu
from ms_accum._check import quantity
from ms_accum.app.plan import show, show_result, show_runtime
from ms_accum.app.report_page import Subject, page, report_path, write_page
from ms_accum.app.reported import answers_of
from ms_accum.app.series import FILE, Metrics, read
from ms_accum.app.steps import choose_device, versions_with
from ms_accum.app.tasks import Text
from ms_accum.app.trained import Trained, load
from ms_accum.network.runtime import keep_cpu_defaults


def show_subject(trained: Trained, test: Any, *, is_given: bool) -> None:
    """Print the model and the data."""
    show("file", trained.path)
    record = trained.record
    if record is None:
        show("model", f"{trained.model}, because {'--model says so' if is_given else 'its parameters fit'}")
        show("data", data_description(trained, test))
        show("record", "none: which data it was trained on is not known")
        return
    updates = quantity(record["updates"], "update")
    show("model", f"{trained.model}, {updates}, {record['optimizer']}, lr {record['lr']:g}")
    if test is not None:
        show("data", data_description(trained, test))
    if trained.result is not None:
        other_data = "" if test is None or trained.is_on_same_data(test) else " on other data"
        show("record", f"{trained.result.name} {trained.result.text}{other_data} after training")


def data_description(trained: Trained, test: Any) -> str:
    """Return the test split in words."""
    path = trained.task.path
    dataset = f" ({trained.record['dataset']})" if trained.record and path else ""
    return f"{path or f'embedded {trained.dataset}'}{dataset}, {trained.task.test_description(test)}"


def checked_report_path(folder: str) -> str:
    """Return the path of the report, if it can be written."""
    try:
        return report_path(folder)
    except (OSError, ValueError) as error:
        raise Failure(f"argument --report: {error}", DISK if isinstance(error, OSError) else USAGE) from error


def subject_of(trained: Trained, test: Any) -> Subject:
    """Return the model, the data and the software for the report."""
    return Subject(
        path=trained.path,
        model=trained.model,
        data=data_description(trained, test),
        record=trained.record,
        same_data=trained.is_on_same_data(test),
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


def write_report(path: str, subject: Subject, sections: Mapping[str, str]) -> None:
    """Write the report."""
    with exit_code(DISK, OSError), exit_code(USAGE, ValueError):
        write_page(path, page(subject, sections, metrics_beside(subject.path)))
    show("report", path)


def sample_of(args: argparse.Namespace, trained: Trained) -> Iterator[str]:
    """Return the text that the model adds to the prompt, which is made while it is read."""
    if not isinstance(trained.task, Text):
        raise Failure(f"argument --sample: is for models of text; {trained.model} classifies images", USAGE)
    options = {"temperature": args.temperature, "seed": args.seed}
    try:
        return trained.task.sample(trained.network, prompt_of(args, trained.task), args.sample, **options)
    except ValueError as error:
        raise Failure(f"argument --prompt: {error}", USAGE) from error


def prompt_of(args: argparse.Namespace, task: Text) -> str:
    """Return the prompt: a line break, or the first character of a vocabulary without one, if none is given."""
    if args.prompt is not None:
        return args.prompt
    characters = task.vocabulary.characters
    return "\n" if not characters or "\n" in characters else characters[0]


def write_sample(args: argparse.Namespace, pieces: Iterator[str]) -> None:
    """Write a text as it comes."""
    show("sample", f"{quantity(args.sample, 'token')}, temperature {args.temperature:g}, seed {args.seed}")
    try:
        print((args.prompt or "").lstrip("\n"), end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)


def main(args: argparse.Namespace) -> None:
    """Load the model, evaluate it on the test split, write the report if it is wanted, and continue a text."""
    if args.use_ema:
        args.ckpt_path = ema_of(args.ckpt_path)
        if not os.path.isfile(args.ckpt_path):
            fault = f"there is no '{args.ckpt_path}'; train.py --ema 0.999 writes it"
            raise Failure(f"argument --use_ema: {fault}", CHECKPOINT)
    choose_device(args.device_target)
    needs_data = args.sample is None or args.report is not None
    trained = load(args.ckpt_path, model=args.model, data_path=args.data_path, needs_data=needs_data)
    sample = None if args.sample is None else sample_of(args, trained)
    test = trained.test_data() if needs_data or trained.has_data else None
    report = None if args.report is None else checked_report_path(args.report)
    show_subject(trained, test, is_given=args.model is not None)
    runtime = tune_cpu(trained.network) if args.runtime == "tuned" else keep_cpu_defaults()
    if args.debug:
        show_runtime(runtime)
    if sample is not None:
        write_sample(args, sample)
    if test is None:
        return
    answers = answers_of(trained, test)
    result = trained.task.evaluate(trained.network, test, None, see=answers.see if report else None)
    try:
        if report is not None:
            subject = subject_of(trained, test)
            write_report(report, subject, answers.sections(subject))
    finally:
        show_result(result)


if __name__ == "__main__":
    gc.freeze()  # MindSpore makes a full collection at each compilation, which would look at all that was imported
    sys.exit(run(main, flags()))
