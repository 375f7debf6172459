"""Python imports this at its start in every process of `python -m tests.cuda.run`: torch gets the pretended device when
it is imported.

Processes that import no torch are left as they are.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _OfTorch(MetaPathFinder):
    """Finds torch once, as it is found without this."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithDevice(spec.loader)
        return spec


class _WithDevice(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        ctypes.CDLL(os.environ["PRETENDED_GUARD"], ctypes.RTLD_GLOBAL)  # torch asks for it once, at its import
        self._loader.exec_module(module)
        from tests.cuda.pretended import process

        process.install()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


sys.meta_path.insert(0, _OfTorch())
