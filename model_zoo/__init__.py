"""What is trained in the examples: small networks and their images.

The networks and what they are trained with are here, their images in `model_zoo.data`. Nothing imports `ms_accum`. The
public names are written once, in `__init__.pyi`, and imported when they are first used, as in `ms_accum`.
"""

import ast
import importlib
import pkgutil

_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
_FOUND = {name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}
_HOMES = dict(sorted(_FOUND.items()))
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list:
    return sorted({*globals(), *__all__})
