"""Small networks, recipes and data sets for the examples and the programs.

Networks and recipes are in this package, data sets in `model_zoo.data`. Nothing imports `ms_accum`. The public names
are listed in `__init__.pyi` only, and imported on first use, as in `ms_accum`.
"""

import ast
import importlib
import pkgutil

_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
_MODULE_BY_NAME = {
    name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names
}
_MODULES = dict(sorted(_MODULE_BY_NAME.items()))
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list:
    return sorted({*globals(), *__all__})
