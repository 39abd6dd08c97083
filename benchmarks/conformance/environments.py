"""The environments of the libraries: what pip installs into each, made when it is first needed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from ..environments import HERE, requirements_of

FOLDER = HERE / ".envs"
SELF = "mindspore"
# What is installed in turn. torch comes first or in the same line at its exact version: else another one is fetched.
# --no-deps: what pulls in a torchvision for CUDA, or asks for another torch than the one that is there.
INSTALLS: dict[str, tuple[tuple[str, ...], ...]] = {
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
    "conformance-jax": (requirements_of("jax"),),
}
# It finds the packages of this environment behind its own: MindSpore is large, and is the one that ms_accum runs with.
ON_TOP_OF_THIS = ("conformance-mindspore",)
VARIABLES = {"DS_BUILD_OPS": "0"}


def python(name: str) -> Path:
    """Return the interpreter of an environment, which is made if it is not there."""
    if name == SELF:
        return Path(sys.executable)
    folder = FOLDER / name
    complete, wanted = folder / "complete", "\n".join(" ".join(line) for line in INSTALLS[name])
    if not complete.exists() or complete.read_text(encoding="utf-8") != wanted:
        print(f"{folder}: {wanted}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if name in ON_TOP_OF_THIS:
            packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
            Path(packages, "ours.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
        for line in INSTALLS[name]:
            command = [folder / "bin" / "pip", "install", "--quiet", *line]
            subprocess.run(command, check=True, env={**os.environ, **VARIABLES})
        complete.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"
