"""Exact gradient accumulation for MindSpore.

The public names are listed in `__init__.pyi` only, for type checkers and for this file. Each is imported on first use,
because the import of MindSpore takes seconds and hundreds of megabytes, and the launcher does not need it.
"""

import ast
import importlib
import pkgutil

__version__ = "0.1.0"
_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
_IMPORTS = [(name.name, node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names]
_MODULES = dict(sorted(_IMPORTS))
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list:
    return sorted({*globals(), *__all__})
