"""Process that loads models and reports imports, opened files and downloads from outside the model directory.

Each line of its input is a folder and the settings of a load; each line of its output is the result. Where a stub
for the package ``kernels`` is on its path, transformers takes it for the real one.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import openmed_nb as nb

KNOWN = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(Path(nb.__file__).parents[1])}
SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib")
INSTALLED = tuple(map(os.path.realpath, (*KNOWN, *SYSTEM)))
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen", "os.system")


class Watch:
    """Records events since the last load."""

    def __init__(self) -> None:
        self.inside: tuple[str, ...] = ()
        self.opened: list[str] = []
        sys.addaudithook(self.record)

    def record(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record files opened outside the directory and network access."""
        if not self.inside:
            return
        if event in NETWORK:
            self.opened.append(event)
        elif event in ("open", "ctypes.dlopen") and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(self.inside):
                self.opened.append(f"{event} {path}")


def answer(watch: Watch, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a model, and return its error, or none, with what happened outside its folder."""
    before, fetched = set(sys.modules), getattr(sys.modules.get("kernels"), "FETCHED", [])
    fetched.clear()
    reset_flash_attention_check()
    watch.opened, watch.inside = [], (*INSTALLED, os.path.realpath(folder))
    error, text = "", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nb.compat.ModelLoader(nb.OpenMedConfig(device="cpu", **settings)).load_model(folder)
    except Exception as caught:  # noqa: BLE001 - the parent looks at it
        error, text = type(caught).__name__, str(caught)
    watch.inside = ()
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in set(sys.modules) - before}
    strange = [name for name, file in files.items() if file and not os.path.realpath(file).startswith(INSTALLED)]
    fetched = getattr(sys.modules.get("kernels"), "FETCHED", [])
    imported = sorted(name for name in strange if name != "kernels")
    return {"error": error, "text": text, "opened": watch.opened, "imported": imported, "fetched": list(fetched)}


def reset_flash_attention_check() -> None:
    """Reset the check of transformers for flash attention, which it caches per process."""
    utils = sys.modules.get("transformers.utils.import_utils")
    for version in (2, 3, 4):
        look = getattr(utils, f"is_flash_attn_{version}_available", None)
        if look:
            look.cache_clear()


if __name__ == "__main__":
    watched = Watch()
    nb.load_model("bundled_small", device="cpu")  # Import the libraries first, because they open files too.
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(watched, **json.loads(line))) + "\n")
        sys.stdout.flush()
