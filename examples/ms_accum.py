"""Not an example: lets `python examples/basic.py` find the package of this clone, without an installation."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before this folder
del sys.modules[__name__]
importlib.import_module(__name__)  # the package takes the place of this module
