"""The libraries: one row for each way to train with them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..environments import SELF, prepared
from ..process import Contender

OURS, RIGHT_LOOP, TUTORIALS = "ms_accum", "right loop", "MindSpore's tutorials"
PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 240
"""int, the seconds that a case may take."""
# Environments. SELF is the one that runs this; MINDSPORE adds packages to it.
TORCH, JAX, MINDSPORE = "conformance-torch", "jax", "conformance-mindspore"


def key_of(name: str, way: str) -> str:
    """Return what the tables call a way of a library."""
    return f"{name}, {way}" if way else name


class Library(NamedTuple):
    """A row of the table: a program, and the environment that it runs in."""

    name: str
    way: str = ""
    environment: str = SELF
    program: str = ""
    documentation: str = ""
    """str, the address of the documentation that the program follows."""
    flags: tuple[str, ...] = ()
    by_design: dict[str, str] = {}
    """dict, by the case why the library's documentation means another result."""
    label: str = ""
    """str, what the table of all cases calls it, if its key is long."""
    missing: str = ""
    """str, why it can't be run here, with the version that was tried: it has no cells then."""

    @property
    def family(self) -> str:
        """str, whose row it shares: its package's, or that of MindSpore's tutorials, which are no library."""
        return TUTORIALS if "tutorial" in self.way else self.name

    @property
    def key(self) -> str:
        """str, its name and its way, if it has several."""
        return key_of(self.name, self.way)

    @property
    def short(self) -> str:
        """str, what the table of all cases calls it."""
        return self.label or self.key


_ACCELERATE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
_BOOST = "https://www.mindspore.cn/docs/en/r2.2/_modules/mindspore/boost/grad_accumulation.html"
_COMPOSER = "https://docs.mosaicml.com/projects/composer/en/stable/api_reference/generated/composer.Trainer.html"
_DEEPSPEED = "https://deepspeed.readthedocs.io/en/latest/training.html#gradient-accumulation"
_IGNITE = "https://docs.pytorch.org/ignite/generated/ignite.engine.create_supervised_trainer.html"
_KERAS = "https://keras.io/api/optimizers/sgd/"
_LIGHTNING = "https://lightning.ai/docs/pytorch/stable/common/trainer.html#accumulate-grad-batches"
_MINDCV = "https://github.com/mindspore-lab/mindcv/blob/main/mindcv/utils/train_step.py"
_MINDONE = "https://github.com/mindspore-lab/mindone/blob/master/mindone/trainers/train_step.py"
_MULTI_STEPS = "https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html"
_OPTAX = "https://github.com/google-deepmind/optax/blob/v0.2.8/optax"
_PARALLEL = "https://www.mindspore.cn/tutorials/en/r2.10.0/parallel/distributed_gradient_accumulation.html"
_TIMM = "https://github.com/huggingface/pytorch-image-models/blob/aa4b5850c1543fa488abf260f18390eda46cf85d/train.py"
_TORCH = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
_TRAINER = "https://huggingface.co/docs/transformers/main_classes/trainer"
_TUTORIAL = "https://www.mindspore.cn/tutorials/experts/en/r2.0/optimize/gradient_accumulation.html"
# What is by design, by the case.
_DIVIDES = {"sum losses": f"It divides the loss by N in place of the user: {_ACCELERATE}"}
_COUNTS = {"warm-up": f"Schedules look at the real iterations, those of micro-batches: {_KERAS}"}
_AVERAGES = {"sum losses": f"The update is that of the average of the gradients: {_KERAS}"}
_LEAVES_OUT = {
    "NaN": "What is left out is as if it had never been, so a window takes a later one: "
    f"{_OPTAX}/transforms/_accumulation.py"
}
# A library has several ways where each is its best one in a case of README; of ours, all.
LIBRARIES = (
    Library(OURS, "driver", SELF, "ours_driver.py"),
    Library(OURS, "Model", SELF, "ours_model.py"),
    Library(OURS, "Accumulator", SELF, "ours_accumulator.py"),
    Library(OURS, "Cells", SELF, "ours_cells.py"),
    Library(RIGHT_LOOP, "", TORCH, "right_loop.py"),
    Library("PyTorch", "loop with a last step", TORCH, "pytorch_loop.py", _TORCH),
    Library("Accelerate", "", TORCH, "accelerate_loop.py", _ACCELERATE, by_design=_DIVIDES),
    Library(
        "Accelerate",
        "with the guide's count of items",
        TORCH,
        "accelerate_loop.py",
        f"{_ACCELERATE}#gradient-accumulation-on-training-samples-of-variable-size",
        ("tokens",),
        label="Accelerate, guide's count",
    ),
    Library("Transformers", "", TORCH, "transformers_trainer.py", _TRAINER, ("default",), label="Transformers Trainer"),
    Library(
        "Transformers",
        "with num_items_in_batch",
        TORCH,
        "transformers_trainer.py",
        _TRAINER,
        ("kwargs",),
        label="Trainer, num_items_in_batch",
    ),
    Library("Lightning", "", TORCH, "lightning_trainer.py", _LIGHTNING),
    Library("Ignite", "", TORCH, "ignite_trainer.py", _IGNITE),
    Library("fastai", "", TORCH, "fastai_callback.py", "https://docs.fast.ai/callback.training.html"),
    Library("Composer", "", TORCH, "composer_trainer.py", _COMPOSER, ("samples",)),
    Library(
        "Composer",
        "with accumulate_train_batch_on_tokens",
        TORCH,
        "composer_trainer.py",
        _COMPOSER,
        ("tokens",),
        label="Composer, by tokens",
    ),
    Library("DeepSpeed", "unmanaged", TORCH, "deepspeed_engine.py", _DEEPSPEED),
    Library(
        "timm",
        "train.py with --variable-batch-loss-scale linear",
        TORCH,
        "timm_train.py",
        _TIMM,
        label="timm, loss scale linear",
    ),
    Library("MindSpore", "2.x tutorial", SELF, "mindspore_tutorial.py", _TUTORIAL),
    Library("MindSpore", "boost", SELF, "mindspore_boost.py", _BOOST),
    Library(
        "MindSpore",
        "parallel.nn.GradAccumulation",
        SELF,
        "mindspore_parallel.py",
        _PARALLEL,
        label="MindSpore, parallel.nn",
    ),
    Library("MindCV", "", MINDSPORE, "mindcv_train_step.py", _MINDCV),
    Library("mindone", "", MINDSPORE, "mindone_train_step.py", _MINDONE),
    Library("Keras", "", TORCH, "keras_fit.py", _KERAS, ("default",), by_design={**_COUNTS, **_AVERAGES}),
    Library(
        "Keras",
        "with sample weights",
        TORCH,
        "keras_fit.py",
        "https://keras.io/api/models/model_training_apis/#fit-method",
        ("weighted",),
        by_design=_COUNTS,
    ),
    Library(
        "optax",
        "MultiSteps with its options",
        JAX,
        "optax_multi_steps.py",
        _MULTI_STEPS,
        by_design=_LEAVES_OUT,
        label="optax, MultiSteps, options",
    ),
    Library("optax", "microbatch of sums", JAX, "optax_microbatch.py", f"{_OPTAX}/microbatching/_microbatching.py"),
    Library("MindFormers", missing="MindFormers 2.1.0 requires MindSpore 2.11, of which there is no wheel"),
    Library("mindnlp", missing="mindnlp 0.5.1 requires MindSpore <= 2.7.0, and cannot be imported with 2.10"),
)


def contender(library: Library) -> Contender:
    """Return the program of a library, to be entered."""
    return Contender(library.key, prepared(library.environment), PROGRAMS / library.program, library.flags, limit=LIMIT)
