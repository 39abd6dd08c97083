"""Text of files, servers and names is shown as text only: a terminal obeys none of it.

Each way is a place where a stranger's text enters a line. The forged line is the last of a program's output, which
programs parse; the rest are characters that a terminal obeys, hides or reorders.
"""

from __future__ import annotations

import http.server
import json
import os
import struct
import sys
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
from mindspore import nn
from mindspore.train.checkpoint_pb2 import Checkpoint
from safetensors.numpy import save_file

from idx_files import zipped
from loopback import sends, serving
from model_zoo import DataError, download_mnist
from ms_accum import launch
from ms_accum._check import LINE, one_line, visible
from ms_accum.app import inspection
from ms_accum.app import plots as plotting
from ms_accum.app.plan import print_line, show
from ms_accum.app.process import OK, USAGE, Failure, lasting_streams, run
from ms_accum.saving.checkpointer import changes
from ms_accum.saving.model_file import CheckpointError, load_model, load_parameters
from ms_accum.saving.training_state import VERSION, state_digest
from ms_accum.training.progress import Lines
from programs import evaluate, train

pytestmark = pytest.mark.host

FORGED = "============== {'Accuracy': 1.0} =============="
NASTY = f"w\x1b[2K\x1b[1A\r\n{FORGED}\n\x07\x9b31m\x7f\u202e\u2066\u2028\u200b"
SURROGATE = f"{NASTY}\udc80"
FILE_NAME = NASTY.replace("/", "|")  # a file's


def control_characters(text):
    """Return the characters that a terminal would not show, but line ends."""
    unseen = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {letter for letter in text if unicodedata.category(letter) in unseen and letter != "\n"}


def safetensors(path, *, tensor=NASTY, metadata=None):
    header = {tensor: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header |= {"__metadata__": metadata} if metadata else {}
    raw = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(4))
    return str(path)


def ckpt(path, *, name=NASTY, kind="Float32", dims=(1,), content=bytes(4)):
    message = Checkpoint()
    value = message.value.add()
    value.tag = name
    value.tensor.tensor_type, value.tensor.tensor_content = kind, content
    value.tensor.dims.extend(dims)
    Path(path).write_bytes(message.SerializeToString())
    return str(path)


def state(path, *, array="network.w", **content):
    text = json.dumps({"version": VERSION, **content})
    arrays = {array: np.zeros(1, np.float32)}
    save_file(arrays, path, metadata={"facts": text, "sha256": state_digest(arrays, text)})
    return str(path)


def written(path, text):
    Path(path).write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def inspect(*argv):
    return run(inspection.main, inspection.flags(), argv)


def plot(*argv):
    return run(plotting.main, plotting.flags(), argv)


def config(key, value="1"):
    return train(f"--config={written('flags.yaml', f'{json.dumps(key)}: {json.dumps(value)}')}")


def metrics(folder, **fields):
    os.makedirs(folder)
    written(Path(folder, "metrics.jsonl"), json.dumps({"update": 1, "loss": 1.0, **fields}) + "\n")
    return folder


def download(answer):
    with serving(answer) as url:
        return train("--data_path=data", f"--download={url}")


def reason(handler: http.server.BaseHTTPRequestHandler):
    handler.wfile.write(f"HTTP/1.1 404 gone\x1b[2K\x1b[1A\r{FORGED}\x9b31m\r\n\r\n".encode("latin-1"))


def header(handler: http.server.BaseHTTPRequestHandler):
    handler.wfile.write(f"HTTP/1.1 302 x\r\nLocation: http://h\x1b[2K\x9b/{FORGED}\r\n\r\n".encode("latin-1"))


def run_in_program(action):
    """Do it as a program's `main` does."""

    class Parser:
        def parse(self, argv):
            return type("Arguments", (), {"debug": bool(argv)})

        def in_flags(self, message):
            return message

    return lambda *argv: run(lambda arguments: action(), Parser(), argv)


def fails(error):
    def action():
        raise error

    return action


def from_metrics():
    """A user's own names of metrics, in the driver's line about an evaluation."""
    context = type("Context", (), {"original_args": lambda self: arguments})()
    arguments = type("Arguments", (dict,), {"cur_epoch_num": 1})(eval_results={NASTY: 1.0, "text": SURROGATE})
    Lines().on_train_epoch_end(context)


SOURCES = {
    "a Parameter in safetensors": lambda: inspect(safetensors("a.safetensors")),
    "a Parameter in a .ckpt": lambda: inspect(ckpt("a.ckpt")),
    "a damaged Parameter in a .ckpt": lambda: inspect(ckpt("a.ckpt", dims=(7,))),
    "a kind of Parameter": lambda: inspect(ckpt("a.ckpt", kind=NASTY)),
    "metadata": lambda: inspect(safetensors("a.safetensors", tensor="w", metadata={NASTY: NASTY})),
    "a header that can't be parsed": lambda: inspect(written("a.safetensors", struct.pack("<Q", 99).decode() + NASTY)),
    "an array of a state": lambda: inspect(state("a.safetensors", array=NASTY)),
    "a setting of a state": lambda: inspect(state("a.safetensors", config={NASTY: NASTY})),
    "a note of a state": lambda: inspect(state("a.safetensors", config={"notes": {NASTY: [NASTY]}})),
    "a fact of a state": lambda: inspect(state("a.safetensors", at={NASTY: NASTY}, best=[NASTY, NASTY])),
    "a file's name": lambda: inspect(safetensors(f"{FILE_NAME}.safetensors", tensor="w")),
    "the name of no file": lambda: inspect(NASTY),
    "the name of no checkpoint": lambda: inspect(written(FILE_NAME, "x")),
    "a checkpoint of none of the networks": lambda: evaluate(f"--ckpt_path={ckpt('a.ckpt')}"),
    "a checkpoint of another network": lambda: evaluate("--model=mlp", f"--ckpt_path={ckpt('a.ckpt')}"),
    "a checkpoint that is not there": lambda: evaluate(f"--ckpt_path={NASTY}.ckpt"),
    "a state to resume from": lambda: train(f"--resume={state('a.safetensors', config={NASTY: NASTY})}"),
    "a key of YAML": lambda: config(NASTY),
    "a key of YAML that is like a flag": lambda: config(f"epochs{NASTY}"),
    "a number in YAML": lambda: config("lr", NASTY),
    "a choice in YAML": lambda: config("optimizer", NASTY),
    "a size in YAML": lambda: config("memory_budget", NASTY),
    "text that is no YAML": lambda: train(f"--config={written('flags.yaml', NASTY + ': [')}"),
    "the name of no YAML": lambda: train(f"--config={NASTY}"),
    "an unknown flag": lambda: train(f"--{NASTY}"),
    "a flag's value": lambda: train(f"--epochs={SURROGATE}"),
    "the folder of no data": lambda: train(f"--data_path={NASTY}"),
    "the reason of an HTTP error": lambda: download(reason),
    "a header of HTTP": lambda: download(header),
    "an entry of an archive": lambda: download(sends(zipped([(NASTY, b"x")]))),
    "a folder of metrics": lambda: plot(metrics(FILE_NAME)),
    "a folder without metrics": lambda: plot(NASTY),
    "a field of metrics": lambda: plot(metrics("out", **{NASTY: SURROGATE})),
    "metrics that are damaged": lambda: plot(metrics(FILE_NAME, loss=NASTY)),
    "the name of no program": lambda: launch.main([NASTY]),
    "an error of the library": run_in_program(fails(CheckpointError(NASTY))),
    "another error": run_in_program(fails(RuntimeError(SURROGATE))),
    "a failure": run_in_program(fails(Failure(SURROGATE, USAGE))),
    "a warning": run_in_program(lambda: sys.stderr.write(warnings.formatwarning(SURROGATE, UserWarning, "x.py", 1))),
    "a fact that is shown": run_in_program(lambda: show("data", SURROGATE)),
    "a line that is said": run_in_program(lambda: print_line(SURROGATE)),
    "a metric of one's own": run_in_program(from_metrics),
    "a setting that differs": run_in_program(lambda: print_line(changes({NASTY: SURROGATE}, {NASTY: "x"})[0])),
}


@pytest.mark.parametrize("way", SOURCES.values(), ids=SOURCES)
@pytest.mark.filterwarnings("always")
def test_crafted_text_is_shown_as_visible_text(way, capfd, tmp_path):
    try:
        way()
    except SystemExit:  # the launcher's, for wrong flags
        pass
    out, err = capfd.readouterr()
    lines = (out + err).splitlines()
    assert lines and control_characters(out + err) == set()
    assert FORGED not in lines and all(len(line) < LINE + 100 for line in lines)


def test_unescaped_text_is_detected(capfd, monkeypatch):
    monkeypatch.setattr("ms_accum._check.visible", lambda text, allowed="": text)
    assert inspect(safetensors("a.safetensors")) == OK
    out, _ = capfd.readouterr()
    assert FORGED in out.splitlines() and "\x1b" in control_characters(out)


def test_traceback_and_printed_text_go_through_stream(capfd):
    def action():
        print(f"a\tb\n{NASTY}")
        raise ValueError(SURROGATE)

    assert run_in_program(action)("--debug") == 1
    out, err = capfd.readouterr()
    assert "Traceback" in err and control_characters(out.replace("\t", "") + err) == set() and "a\tb\n" in out


def test_progress_bar_still_redraws_its_line(capfd):
    from tqdm import tqdm

    with lasting_streams():
        with tqdm(total=2, file=sys.stdout, position=0) as first, tqdm(total=2, file=sys.stdout, position=1) as second:
            first.update()
            second.update()
            print_line(f"between {NASTY}")
    out, _ = capfd.readouterr()
    assert "\r  0%|" in out and "\x1b[A" in out and "\\r" not in out.replace("\\r\\n", "") and "\x1b[2K" not in out
    assert f"{one_line(f'between {NASTY}')}\n" in out


def test_crafted_text_is_escaped_for_library_users(tmp_path):
    """Errors of the library in a user's own program, which prints them as it likes."""
    network = nn.Dense(2, 1)
    for action in (
        lambda: load_model(network, ckpt("a.ckpt")),
        lambda: load_parameters(ckpt("b.ckpt", dims=(7,))),
        lambda: load_parameters(written(f"{FILE_NAME}.ckpt", "x")),
    ):
        with pytest.raises(CheckpointError) as caught:
            action()
        assert control_characters(str(caught.value)) == set() and "\n" not in str(caught.value)
    with serving(reason) as url, pytest.raises(OSError, match="404") as caught:
        download_mnist("data", url)
    assert control_characters(str(caught.value)) == set() and "\n" not in str(caught.value)
    with serving(sends(zipped([(NASTY, b"x")]))) as url, pytest.raises(DataError) as caught:
        download_mnist("data", url)
    assert control_characters(str(caught.value)) == set() and "\n" not in str(caught.value)


# What is visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u5b57\u3000\u00a0\u00e9 \U0001f600", "plain \u5b57\u3000\u00a0\u00e9 \U0001f600"),
        ("\x1b\x00\x9b\x7f", r"\x1b\x00\x9b\x7f"),
        ("\u202e\u2066\u2028\u200b\U000e0041", r"\u202e\u2066\u2028\u200b\U000e0041"),
        ("\udc80", r"\udc80"),
        ("a\nb\tc", "a\nb\tc"),
        ("a\rb", r"a\rb"),
    ],
)
def test_each_character_is_visible(text, shown):
    assert visible(text) == shown
    assert one_line(text) == shown.replace("\n", r"\n").replace("\t", r"\t")
    shown.encode()


def test_long_text_is_cut():
    assert one_line("x" * 200) == "x" * 200 and one_line("x" * 10**6) == "x" * 200 + "..."
    assert one_line(7) == "7" and one_line("abc", most=2) == "ab..."
