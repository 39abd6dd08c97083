"""Ours: the stages before the first update, and what windows of other sizes compile."""

from __future__ import annotations

import time

BEGAN = time.time()  # before the imports, which are what is measured

from collections.abc import Sequence  # noqa: E402
from typing import Any, Callable  # noqa: E402

from protocol import flags_of, serve, timed  # noqa: E402


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


def build(started: float, data: str, network: str, window: int) -> tuple[dict, Callable[..., dict]]:
    """Do what train.py does before its first update, stage by stage; `started` is when the process was, `time.time`."""
    marks = {"": started, "interpreter": BEGAN}

    def mark(stage: str) -> None:
        marks[stage] = time.time()

    import mindspore as ms
    from mindspore import Tensor, nn

    mark("import mindspore")
    from model_zoo import MODELS, create_dataset
    from ms_accum import GradientAccumulation, tune_cpu
    from ms_accum.programs import tasks  # noqa: F401  all that train.py imports

    mark("import ms_accum")
    size = MODELS[network].image_size
    train = create_dataset(data, 32, usage="train", image_size=size, seed=1)
    create_dataset(data, 100, usage="test", image_size=size)
    columns = next(train.create_tuple_iterator(num_epochs=1, output_numpy=True))
    mark("data")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    trained = MODELS[network].make()
    tune_cpu(trained)
    optimizer = nn.Momentum(trained.trainable_params(), 0.01, 0.9)
    driver = GradientAccumulation(trained, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), optimizer)
    mark("build")
    graphs: list[str] = []
    count_graphs(graphs)

    def answer(rows: Sequence[int]) -> dict:
        """Train one window whose micro-batches have these numbers of rows."""
        del graphs[:]
        batches = [tuple(Tensor(column[:count]) for column in columns) for count in rows]
        seconds, _ = timed(driver.train_process, 1, batches, window, report=(), ckpt_path=None)
        return {"seconds": seconds, "graphs": graphs}

    ends = list(marks.values())
    seconds = {name: end - began for name, began, end in zip([*marks][1:], ends, ends[1:])}
    return {"versions": {"mindspore": ms.__version__}, "stages": seconds}, answer


serve(build, **flags_of(build))
