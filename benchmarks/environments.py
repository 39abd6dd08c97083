"""The environments of the programs: what pip installs into each, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).parent
PEERS = ("torch", "jax")
SELF = "mindspore"


def requirements_of(kind: str) -> tuple[str, ...]:
    """Return what pip installs for "torch" or "jax"."""
    return tuple((HERE / f"requirements-{kind}.txt").read_text(encoding="utf-8").split())


# What is installed in turn. torch comes first or in the same line at its exact version: else another one is fetched.
# --no-deps: what pulls in a torchvision for CUDA, or asks for another torch than the one that is there.
INSTALLS: dict[str, tuple[tuple[str, ...], ...]] = {
    **{kind: (requirements_of(kind),) for kind in PEERS},
    "conformance-torch": (
        requirements_of("torch")
        + ("accelerate==1.15.0", "transformers==5.24.0", "lightning==2.6.6")
        + ("pytorch-ignite==0.5.5", "fastai==2.8.12", "keras==3.15.1", "setuptools<81", "wheel"),
        ("--no-deps", "timm==1.0.31", "hjson==3.1.0", "ninja==1.13.2", "py-cpuinfo==9.0.0", "einops==0.8.2")
        + ("msgpack==1.2.4",),
        ("--no-deps", "--no-build-isolation", "deepspeed==0.19.8"),
        ("--no-deps", "mosaicml==0.32.1", "mosaicml-cli==0.8.3", "mosaicml-streaming==0.13.0", "torch-optimizer==0.3.0")
        + ("pytorch-ranger==0.1.1", "coolname==5.0.0", "tabulate==0.10.0", "backoff==2.2.1", "python-snappy==0.7.3")
        + ("zstd==1.5.7.2", "gql==4.4.0", "docker==7.2.0", "argcomplete==3.7.2", "questionary==2.1.1", "zipp==4.1.2")
        + ("ruamel.yaml==0.19.1", "validators==0.36.0", "importlib_metadata==8.5.0", "graphql-core==3.3.2")
        + ("tenacity==9.2.1", "prompt_toolkit==3.0.53", "wcwidth==0.9.4"),
    ),
    "conformance-mindspore": (("--no-deps", "mindcv==0.3.0", "mindone==0.5.0"),),
}
# It finds the packages of this environment behind its own: MindSpore is large, and is the one that ms_accum runs with.
ON_TOP_OF_THIS = ("conformance-mindspore",)
VARIABLES = {"DS_BUILD_OPS": "0"}


def python(name: str) -> Path | None:
    """Return the interpreter of an environment, for "mindspore" this one; None where it was not set up as it is now."""
    if name == SELF:
        return Path(sys.executable)
    complete = _marker(name)
    there = complete.exists() and complete.read_text(encoding="utf-8") == _lines(name)
    return complete.parent / "bin" / "python" if there else None


def prepared(name: str) -> Path:
    """Return the interpreter of an environment, which is made if it is not there."""
    return python(name) or _make(name)


def run(arguments: Namespace) -> None:
    """Make the peers' environments, one for each: their requirements contradict each other."""
    del arguments
    for kind in PEERS:
        print(prepared(kind))


def _make(name: str) -> Path:
    folder = _marker(name).parent
    print(f"{folder}: {_lines(name)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    if name in ON_TOP_OF_THIS:
        packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(packages, "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    for line in INSTALLS[name]:
        command = [folder / "bin" / "pip", "install", "--quiet", *line]
        subprocess.run(command, check=True, env={**os.environ, **VARIABLES})
    _marker(name).write_text(_lines(name), encoding="utf-8")
    return folder / "bin" / "python"


def _lines(name: str) -> str:
    return "\n".join(" ".join(line) for line in INSTALLS[name])


def _marker(name: str) -> Path:
    """Return the file that marks an environment as complete: an interrupted installation leaves an incomplete one."""
    return HERE / ".envs" / name / "complete"
