"""How is a model saved and loaded?"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import nn

from .. import _check
from ..layers.batch_norm import SUMS
from ..layers.dropout import COUNTER
from .checkpoint_file import fault_of
from .files import as_given, write_whole
from .model_record import DEFAULT, keep_previous, remove_record, write_record
from .model_record import CheckpointError as CheckpointError

FORMATS = ("ckpt", "safetensors")


def check_name(owner: str, *paths: str | os.PathLike[str]) -> None:
    """Reject names that do not end like a checkpoint's, and paths that exist but are not files."""
    for name in [os.fspath(path) for path in paths]:
        if _format(name) not in FORMATS:
            raise ValueError(f"For '{owner}', 'ckpt_path' must end with '.ckpt' or '.safetensors', but got '{name}'.")
        if os.path.isdir(name):
            raise ValueError(f"For '{owner}', 'ckpt_path' must name a file, but got the folder '{name}'.")
        if os.path.exists(name) and not os.path.isfile(name):
            raise ValueError(f"For '{owner}', 'ckpt_path' must name a file, but got the device or pipe '{name}'.")


def check_path(owner: str, path: str | os.PathLike[str] | None, network: nn.Cell) -> None:
    """Raise an error before training if the network can't be saved to `path`; None means that it is not saved."""
    if path is None:
        return
    check_name(owner, path)
    check_folder(owner, path)
    narrow = [parameter.name for parameter in network.get_parameters() if parameter.dtype == ms.bfloat16]
    if narrow and _format(os.fspath(path)) == "safetensors":
        raise ValueError(
            f"For '{owner}', 'ckpt_path' must end with '.ckpt' for a network with bfloat16 parameters, such as "
            f"'{narrow[0]}', but got '{path}'."
        )


def check_folder(owner: str, path: str | os.PathLike[str]) -> None:
    """Raise an error before training if the folder of `path` can't be written to."""
    folder = os.path.dirname(os.path.realpath(path))  # the target of a link
    if not os.path.isdir(folder):
        rule = "the folder of 'ckpt_path' must exist"
        raise ValueError(f"For '{owner}', {rule}, but got '{os.path.relpath(folder)}'. Create it first.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"For '{owner}', the folder of 'ckpt_path' must be writable, but got '{path}'.")


def save_model(network: nn.Cell, path: str | os.PathLike[str], record: Mapping[str, Any] | None = None) -> None:
    """Write only the network's parameters to `path`, in the format of its extension, and then their record.

    Raises:
        OSError: If the file can't be written; an existing file is unchanged.
    """
    size = sum(parameter.nbytes for parameter in network.get_parameters())
    os.makedirs(os.path.dirname(os.path.realpath(path)), exist_ok=True)  # it may have been removed during the run
    write_whole(path, size, partial(_save_and_verify, network))
    if record is None or _format(os.fspath(path)) == "safetensors":
        remove_record(path)
    if record is not None:
        write_record(path, record)


def save_trained(network: nn.Cell, path: str | os.PathLike[str], at: str | None = None) -> None:
    """Do what `save_model` does. An existing model under the default name is kept under another name, with a warning.

    Args:
        network (Cell): the network to save.
        path (str): the path as the user gave it.
        at (Optional[str]): the absolute path, if the program may have changed its working directory since then.
            Default: ``None``, `path`.

    Raises:
        OSError: If the file can't be written; an existing file is unchanged.
    """
    place = os.fspath(path) if at is None else as_given(at, path)
    kept = keep_previous(place) if os.fspath(path) == DEFAULT else None
    save_model(network, place)
    if kept:
        # Printed to stderr where a program has not set up logging.
        logging.getLogger("ms_accum").warning("'%s' is replaced; the model that it held is kept as '%s'.", place, kept)


def _save_and_verify(network: nn.Cell, path: str) -> None:
    ms.save_checkpoint(network, path, format=_format(path), crc_check=True)
    fault = fault_of(path)
    if fault:
        raise OSError(f"what was written can't be read back: {fault}")


def load_parameters(path: str) -> dict[str, Any]:
    """Read a checkpoint's parameters by name.

    Raises:
        CheckpointError: If there is no such file, or it is not a checkpoint.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a file. Give the path of a checkpoint that train.py wrote.")
    try:
        fault = fault_of(path)
        parameters = {} if fault else ms.load_checkpoint(path, format=_format(path))
    except Exception as error:
        raise CheckpointError(f"'{path}' is not a checkpoint that MindSpore can read.") from error
    if fault:
        raise CheckpointError(f"'{path}' is not a valid checkpoint: {fault}.")
    if not parameters:
        raise CheckpointError(f"'{path}' contains no parameters.")
    return parameters


def differences(network: nn.Cell, parameters: dict[str, Any]) -> list[str]:
    """Return one text for each difference between `parameters` and those of `network`."""
    own = {parameter.name: _kind(parameter) for parameter in network.get_parameters()}
    return differences_of(own, {name: _kind(parameter) for name, parameter in parameters.items()})


def differences_of(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return one text for each name whose description differs, is missing or is unexpected."""
    shown = {name: _check.one_line(name) for name in (*expected, *found)}
    missing = [f"missing {shown[name]}" for name in expected if name not in found]
    unexpected = [f"unexpected {shown[name]}" for name in found if name not in expected]
    both = [name for name in expected if name in found and found[name] != expected[name]]
    return missing + unexpected + [f"{shown[name]} is {found[name]} instead of {expected[name]}" for name in both]


def shortened(wrong: Sequence[str]) -> str:
    """Return the first differences as one line."""
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return ", ".join(wrong[:3]) + more


def load_model(network: nn.Cell, path: str) -> None:
    """Load a checkpoint into `network`, completely or not at all.

    Raises:
        CheckpointError: If the checkpoint can't be read, or is of another architecture.
    """
    parameters = load_parameters(path)
    wrong = differences(network, parameters)
    if wrong:
        raise CheckpointError(f"'{path}' is of another architecture: {shortened(wrong)}.{_way_out(wrong)}")
    ms.load_param_into_net(network, parameters)


def _way_out(wrong: Sequence[str]) -> str:
    """Return what to do if the only difference is what `replace_dropout` or `pool_batch_norm` adds to a network."""
    for ending, call in ((COUNTER, "replace_dropout"), (SUMS, "pool_batch_norm")):
        if all(each.endswith(ending) for each in wrong):
            before = f"without {call}. Load it before {call}", f"after {call}. Call {call} on the network first"
            return f" It was trained {before[wrong[0].startswith('unexpected')]}."
    return ""


def _format(path: str) -> str:
    return os.path.splitext(path)[1][1:]


def _kind(parameter: Any) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}"
