"""Compiles guard.cpp against the installed torch and driver.cpp, once, into the product's own folder of libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from moe.kernels.compiler import cache_folder, compile_library

SOURCE = Path(__file__).with_name("guard.cpp")
DRIVER = Path(__file__).with_name("driver.cpp")


def guard() -> Path:
    """The compiled guard. Raises RuntimeError with what the compiler said, or OSError without a compiler."""
    libraries = Path(torch.__file__).with_name("lib")
    # Another torch is another binary interface, also where its headers have the same path: its version is part of the
    # flags.
    version = "".join(c if c.isalnum() else "_" for c in torch.__version__)
    flags = ["-std=c++20", "-fPIC", "-w", f"-DTORCH_{version}", *(f"-I{path}" for path in include_paths())]
    links = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    try:
        return compile_library(SOURCE, cache_folder(), flags, links)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"{SOURCE.name} does not compile against torch {torch.__version__}:\n{error.stderr}"
        ) from None


def driver() -> Path:
    """The compiled library that stands in for NVIDIA's driver."""
    return compile_library(DRIVER, cache_folder(), ["-fPIC"], [])
