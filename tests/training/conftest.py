"""A small corpus and its cache, so that these tests need no other preparation."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

MODULES = (
    "argparse",
    "ast",
    "calendar",
    "decimal",
    "difflib",
    "inspect",
    "logging/__init__",
    "mailbox",
    "tarfile",
    "textwrap",
    "typing",
)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that train on a few files of the standard library with a small tokenizer; prepared by the first run."""
    corpus, cache = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("cache")
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        shutil.copy(library / f"{module}.py", corpus / f"{module.replace('/', '_')}.py")
    return [
        f"data.corpus={corpus}",
        f"data.cache_dir={cache}",
        "data.vocab_size=384",
        "data.num_workers=1",
        "data.validation_fraction=0.2",
    ]
