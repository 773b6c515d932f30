"""Tiny models, a model hub on 127.0.0.1, and a client of it, for the tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.annotations import NOTE, words_of

FOLDER = Path(__file__).parent


@pytest.fixture
def folder(keyword_model: Path, tmp_path: Path) -> Path:
    """A copy of the keyword model that a test may change."""
    return shutil.copytree(keyword_model, tmp_path / "model")


@pytest.fixture(scope="session")
def load_folder(home: str) -> Callable[..., Any]:
    """A function that loads the model of a folder; the remaining arguments are settings."""
    from openmed_nb.models.config import OpenMedConfig
    from openmed_nb.models.loading import LoadSpec, load_from_spec

    def load_folder(folder: Path, remote_code: bool = False, **config: Any) -> Any:
        return load_from_spec(LoadSpec.from_name(str(folder), OpenMedConfig(**config), remote_code), home)

    return load_folder


@pytest.fixture(scope="session")
def find(load_folder: Callable[..., Any]) -> Callable[..., list[str]]:
    """A function that returns the pieces of a text that the model of a folder takes for entities."""
    from openmed_nb.annotation.pipeline import build_pipeline

    def find(folder: Path, text: str = NOTE, strategy: str = "first", **config: Any) -> list[str]:
        return words_of(build_pipeline(load_folder(folder, **config), strategy, {}), text)

    return find


@dataclass
class HubClient:
    """A process that loads models from a hub."""

    process: subprocess.Popen[str]

    def load(self, name: str, environment: dict[str, str] | None = None, **config: Any) -> dict[str, Any]:
        """Load a model and return the entities of a sentence, or the error, or the end of a crashed process."""
        request = {"name": name, "config": {"device": "cpu", **config}, "environment": environment or {}}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def start_client() -> Iterator[Callable[..., HubClient]]:
    """A function that starts a client process with some environment variables; they all end with the module."""
    processes = []
    # Without what points to a hub, a cache or a proxy.
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HF_") and not name.lower().endswith("_proxy")
    }

    def start(**environment: str) -> HubClient:
        command = [sys.executable, FOLDER / "hub_client.py"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, **pipes, text=True, env=environ | environment))
        return HubClient(processes[-1])

    yield start
    for process in processes:
        process.communicate(timeout=30)
