"""Where is the zoo in a clone?

In the folder `model_zoo`, which is installed in place of this folder. Each module is loaded once, whichever of its two
names is imported: otherwise there would be two `DataError`s, and `except` would catch only one of them.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_NAME, _SOURCE = "model_zoo", Path(__file__).resolve().parents[2] / "model_zoo" / "__init__.py"


class _AliasFinder:
    """Finds `ms_accum.zoo.lenet` as `model_zoo.lenet`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create a module, which is not used."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_NAME + module.__name__[len(__name__) :])


def _comes_from_clone() -> bool:
    """Return whether `model_zoo` is that of the clone: the user's own `model_zoo` may come first."""
    spec = find_spec(_NAME)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == _SOURCE


def _load() -> ModuleType:
    """Load the clone's folder as `ms_accum.zoo`."""
    spec = spec_from_file_location(__name__, _SOURCE)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no '{_SOURCE}'")
    module = sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if _comes_from_clone():
    sys.meta_path.insert(0, _AliasFinder())  # type: ignore[arg-type]
    sys.modules[__name__] = import_module(_NAME)
else:
    _load()
