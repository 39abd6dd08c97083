"""The operators of `ms_accum/native.py`; everything else about the package is in pyproject.toml.

Without a C++ compiler the package is installed without them. There is no fused multiply-add, because the bytes of a
result must not depend on the CPU, and so no -march=native either.
"""

from setuptools import Extension, setup

FLAGS = "-O3 -g0 -std=c++17 -pthread -fno-fast-math -ffp-contract=off -fno-math-errno -fno-trapping-math".split()


def built_as(name, *flags):
    """Return the operators as an extension of this name."""
    return Extension(f"ms_accum.{name}", ["ms_accum/native.cc"], extra_compile_args=[*FLAGS, *flags], optional=True)


setup(ext_modules=[built_as("_native"), built_as("_native_avx2", "-mavx2")])  # elsewhere -mavx2 is no flag
