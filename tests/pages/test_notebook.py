"""The notebook runs from top to bottom and reproduces its stored outputs; "Stop" ends a run, not the kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "window.ipynb"
# In a process of its own: the libraries of notebooks warn of their own future.
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": sys.argv[2]}}).execute()
print(nbformat.writes(notebook))
"""

# Interrupts a run of the driver in a kernel three times, each time when it says that it runs, and trains again.
STOP = """
import queue
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel()

def run(code):
    message, shown = client.execute(code), ""
    while manager.is_alive():
        try:
            answer = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        kind, content = answer["msg_type"], answer["content"]
        if answer["parent_header"].get("msg_id") != message:
            continue
        if kind == "stream":
            shown += content["text"]
            if "running" in content["text"]:
                manager.interrupt_kernel()
        if kind == "error":
            shown += content["ename"] + "\\n"
        if kind == "status" and content["execution_state"] == "idle":
            return shown
    return shown + "the kernel died"

print(run('''
import signal
import numpy as np
from mindspore import Tensor, nn
from mindspore.train import Callback
from ms_accum import GradientAccumulation

network = nn.Dense(256, 256)
model = GradientAccumulation(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.001))
rows = Tensor(np.ones((256, 256), np.float32))

class Tell(Callback):
    def on_train_epoch_end(self, run_context):
        if run_context.original_args().cur_epoch_num == 3:
            print("running", flush=True)

def train(epochs, **options):
    model.train_process(epochs, [(rows, rows)] * 8, 4, report=(), ckpt_path=None, **options)
'''))
for _ in range(3):
    print(run("train(10_000, callbacks=Tell())"))
print(run("train(1); print('again', signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"))
manager.shutdown_kernel(now=True)
"""


def shown(notebook):
    """Return what the cells show: printed texts and values, and the kinds of pictures."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    texts = [output["text"] if "text" in output else output["data"]["text/plain"] for output in outputs]
    pictures = [kind for output in outputs for kind in output.get("data", {}) if kind.startswith("image/")]
    return [text for text in map("".join, texts) if "object" not in text and "Figure" not in text], pictures


def numbers(svg):
    """Return all words and numbers of a picture."""
    return re.findall(r"[\w.#]+", svg)


def test_stored_outputs_are_complete():
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    texts, pictures = shown(stored)
    assert pictures == ["image/svg+xml", "image/png"]
    assert "accumulated and large batch differ by less than 1e-6: True" in "".join(texts)
    window = (ROOT / "docs" / "images" / "window.svg").read_text(encoding="utf-8")
    (svg,) = [output["data"]["image/svg+xml"] for output in code[0]["outputs"]]
    assert numbers("".join(svg)) == numbers(window)  # IPython writes other quotation marks


@pytest.mark.slow
def test_notebook_reproduces_stored_outputs():
    pytest.importorskip("nbclient", reason="nbclient is not installed (requirements-dev.txt)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), str(NOTEBOOK.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert shown(json.loads(done.stdout)) == shown(json.loads(NOTEBOOK.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_stop_in_a_notebook_leaves_the_kernel_and_the_driver():
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (requirements-dev.txt)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", STOP], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["running", "KeyboardInterrupt"] * 3 + ["again", "True"]
