"""What survives the end of a run?"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import mindspore as ms
from mindspore import nn


class CheckpointError(ValueError):
    """A checkpoint can't be read, or belongs to another network."""


def check_name(owner: str, path: str | os.PathLike[str]) -> None:
    """Refuse a name that MindSpore would not give to a checkpoint, or that a folder has."""
    name = os.fspath(path)
    if not name.endswith(".ckpt"):
        raise ValueError(f"For '{owner}', 'ckpt_path' must end with '.ckpt', but got '{name}'.")
    if os.path.isdir(name):
        raise ValueError(f"For '{owner}', 'ckpt_path' must name a file, but got the folder '{name}'.")


def check_folder(owner: str, path: str | os.PathLike[str]) -> None:
    """Find out before the work, not after it, that nothing can be written beside `path`."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"For '{owner}', the folder of 'ckpt_path' must exist, but got '{path}'. Make it first.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"For '{owner}', the folder of 'ckpt_path' must be writable, but got '{path}'.")


def save_model(network: nn.Cell, path: str | os.PathLike[str]) -> None:
    """Write the network's parameters, and nothing else, to `path`.

    MindSpore deletes the old file before it writes the new one, and leaves pieces when it fails: it
    writes into a folder of its own, and what is whole takes the old file's place.

    Raises:
        OSError: If the file can't be written; the old one is untouched.
    """
    name = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(name))
    try:
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as staging:
            whole = os.path.join(staging, "model.ckpt")
            ms.save_checkpoint(network, whole)
            os.replace(whole, name)
    except (OSError, RuntimeError, ValueError) as error:
        raise OSError(f"'{name}' can't be written: {error}") from error


def load_parameters(path: str) -> dict[str, Any]:
    """Read a checkpoint's parameters by name.

    Raises:
        CheckpointError: If there is no such file, or it is no checkpoint.
    """
    if not os.path.isfile(path):
        raise CheckpointError(f"'{path}' is not a file. Give the path of a checkpoint that train.py wrote.")
    try:
        parameters = ms.load_checkpoint(os.fspath(path))
    except Exception as error:
        raise CheckpointError(f"'{path}' is not a checkpoint that MindSpore can read.") from error
    if not parameters:
        raise CheckpointError(f"'{path}' holds no parameters.")
    return parameters


def differences(network: nn.Cell, parameters: dict[str, Any]) -> list[str]:
    """Say, name by name, in what `parameters` are not those of `network`; nothing where they fit."""
    own = {parameter.name: parameter for parameter in network.get_parameters()}
    missing = [f"missing {name}" for name in own if name not in parameters]
    unexpected = [f"unexpected {name}" for name in parameters if name not in own]
    mismatched = [
        f"{name} is {_kind(parameters[name])} instead of {_kind(parameter)}"
        for name, parameter in own.items()
        if name in parameters and _kind(parameters[name]) != _kind(parameter)
    ]
    return missing + unexpected + mismatched


def load_model(network: nn.Cell, path: str) -> None:
    """Load a checkpoint into `network`, whole or not at all.

    Raises:
        CheckpointError: If the checkpoint can't be read or is of another architecture.
    """
    parameters = load_parameters(path)
    wrong = differences(network, parameters)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"'{path}' is of another architecture: {', '.join(wrong[:3])}{more}.")
    ms.load_param_into_net(network, parameters)


def _kind(parameter: Any) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}"
