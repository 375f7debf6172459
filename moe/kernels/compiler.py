"""Compile `kernels.cpp` and its headers to one shared library in the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("kernels.cpp")
# No -ffast-math: NaN and infinities must be preserved, and additions keep their order. OpenMP's functions are found in
# the library that torch has loaded.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp", "-w")
WITHOUT_AVX512 = "-mno-avx512f"
COMPILE_SECONDS = 120.0


def cache_folder() -> Path:
    """Return the user's cache folder for compiled kernels, which is safe to delete."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixtrain"


def _processor() -> str:
    """Return text that identifies the processor's model and instruction sets, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def fingerprint(compiler_version: str, source: Path | None = None, flags: Sequence[str] = FLAGS) -> str:
    """Return a hash of everything that determines a compiled library: sources, compiler, processor and flags."""
    source = source or SOURCE
    sources = [source, *sorted(source.parent.glob("*.h"))]
    texts = [f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in sources]
    return hashlib.sha256("\n".join((*texts, compiler_version, _processor(), *flags)).encode()).hexdigest()[:16]


def flags_for(capability: str) -> tuple[str, ...]:
    """Return the compiler flags for `capability`, the result of torch.backends.cpu.get_cpu_capability().

    If ATEN_CPU_CAPABILITY keeps torch from using AVX-512, the kernels do not use it either.
    """
    is_older = platform.machine() == "x86_64" and "AVX512" not in capability
    return (*FLAGS, WITHOUT_AVX512) if is_older else FLAGS


def compile_library(source: Path, folder: Path, flags: Sequence[str], links: Sequence[str] = ()) -> Path:
    """Return the library in `folder` that belongs to a C++ file; compile it if it is missing there.

    The library also depends on the headers in the C++ file's folder. `links`: arguments of the linker. Raises OSError
    or subprocess.SubprocessError if the compilation fails.
    """
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (c++, g++ or clang++) on the PATH. Install g++ or clang++.")

    def run(*arguments: str) -> Any:
        command = [compiler, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True).stdout

    library = folder / f"{source.stem}-{fingerprint(run('--version'), source, (*flags, *links))}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            half, whole = Path(scratch, "half.o"), Path(scratch, "whole.so")
            run(*flags, "-c", str(source), "-o", str(half))
            run("-shared", str(half), *links, "-o", str(whole))
            whole.replace(library)  # ranks that compile at the same time write the same file
    return library
