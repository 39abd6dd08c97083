"""Where does the time go before our first update, and what do windows of other sizes compile?"""

from __future__ import annotations

import time

BEGAN = time.time()  # before the imports, which are what is measured

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any, Callable  # noqa: E402

from protocol import serve  # noqa: E402


class Stages:
    """Seconds from mark to mark.

    Args:
        started (float): when the process was started, by `time.time`.
    """

    def __init__(self, started: float):
        self.seconds = {"interpreter": BEGAN - started}
        self._last = BEGAN

    def mark(self, name: str) -> None:
        """End a stage."""
        now = time.time()
        self.seconds[name] = now - self._last
        self._last = now


def count_graphs(seen: list[str]) -> None:
    """Have `seen` grow by the name of each graph that is compiled.

    MindSpore has no public counter; it asks this just before each compilation, and never when it has the graph.
    """
    try:
        from mindspore.graph import api
    except ImportError:  # before MindSpore 2.9
        from mindspore.common import api
    asked = api._check_recompile

    def count(obj: Any, args: Any, kwargs: Any, full_name: str, create_time: Any, name: str) -> Any:
        seen.append(name)
        return asked(obj, args, kwargs, full_name, create_time, name)

    api._check_recompile = count


def build() -> tuple[dict, Callable[..., dict]]:
    """Do what train.py does before its first update, stage by stage."""
    stages = Stages(arguments.started)
    import mindspore as ms
    from mindspore import Tensor, nn

    stages.mark("import mindspore")
    from model_zoo import MODELS, create_dataset
    from ms_accum import GradientAccumulation, program, report, tune_cpu  # noqa: F401  all that train.py imports

    stages.mark("import ms_accum")
    model = MODELS[arguments.network]
    size = model.image_size
    train = create_dataset(arguments.data, 32, usage="train", image_size=size, seed=1)
    create_dataset(arguments.data, 100, usage="test", image_size=size)
    columns = next(train.create_tuple_iterator(num_epochs=1, output_numpy=True))
    stages.mark("data")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    network = model.make()
    tune_cpu(network)
    optimizer = nn.Momentum(network.trainable_params(), 0.01, 0.9)
    driver = GradientAccumulation(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), optimizer)
    stages.mark("build")
    graphs: list[str] = []
    count_graphs(graphs)

    def answer(rows: Sequence[int]) -> dict:
        """Train one window whose micro-batches have so many rows."""
        del graphs[:]
        batches = [tuple(Tensor(column[:count]) for column in columns) for count in rows]
        began = time.perf_counter()
        driver.train_process(1, batches, arguments.window, report=(), ckpt_path=None)
        return {"seconds": time.perf_counter() - began, "graphs": graphs}

    return {"versions": {"mindspore": ms.__version__}, "stages": stages.seconds}, answer


parser = argparse.ArgumentParser()
parser.add_argument("--started", type=float, required=True, help="time.time() when the process was started")
parser.add_argument("--data", required=True, help="folder with train/ and test/")
parser.add_argument("--network", default="lenet5")
parser.add_argument("--window", type=int, default=4)
arguments = parser.parse_args()
serve(build)
