"""What of a training changes its figures: the loader, the seeds, and what was asked of torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigurationError, shorten
from .plain_values import LARGEST, from_plain
from .sections import Loader
from .surroundings import Randomness

NAME = re.compile(r"[A-Za-z_][\w.]{0,39}", re.ASCII)

SEEDS = "Pass a whole number, or names and whole numbers, such as {'torch': 1, 'numpy': 2}."


def loader_of(loader: Any) -> Loader | None:
    """Return how a ``DataLoader`` loads; nothing is read from it.

    Raises:
        ConfigurationError: For what is no ``DataLoader``.

    Example:
        >>> import torch
        >>> loader_of(torch.utils.data.DataLoader([1, 2], batch_size=2)).worker_seeding
        'no workers'
    """
    if loader is None:
        return None
    try:
        facts: Loader = from_plain(Loader, _facts(loader))
    except (AttributeError, ValueError) as error:
        what = f"{type(loader).__name__} is no DataLoader."
        raise ConfigurationError(what, "Pass the loader of the training.") from error
    return facts


def _facts(loader: Any) -> dict[str, Any]:
    context, seeding = loader.multiprocessing_context, "worker_init_fn" if loader.worker_init_fn else "torch"
    return {
        "workers": loader.num_workers,
        "batch_size": loader.batch_size,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "prefetch_factor": loader.prefetch_factor,
        "start_method": None if context is None else context.get_start_method(),
        "seeded": loader.generator is not None,
        "worker_seeding": seeding if loader.num_workers else "no workers",
    }


def seeds_of(seeds: Any) -> dict[str, int]:
    """Return seeds by what they are of.

    Raises:
        ConfigurationError: For what is no seed, or no name of one.

    Example:
        >>> seeds_of(7), seeds_of({"numpy": 1}), seeds_of(None)
        ({'seed': 7}, {'numpy': 1}, {})
    """
    if seeds is None:
        return {}
    named = seeds if isinstance(seeds, Mapping) else {"seed": seeds}
    for name, seed in named.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigurationError("A name of a seed is no short word.", SEEDS)
        if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= LARGEST:
            raise ConfigurationError(f"The seed {shorten(name)!r} is {type(seed).__name__}, or too large.", SEEDS)
    return dict(named)


def randomness_of(seeds: Any) -> Randomness:
    """Return the seeds, and what torch was asked for; torch is not imported for that.

    Example:
        >>> import torch
        >>> randomness_of(7).deterministic_algorithms
        False
    """
    torch, named = sys.modules.get("torch"), seeds_of(seeds)
    if torch is None:
        return Randomness(named)
    cudnn = torch.backends.cudnn
    return Randomness(
        seeds=named,
        torch_seed=int(torch.initial_seed()),
        deterministic_algorithms=bool(torch.are_deterministic_algorithms_enabled()),
        warn_only=bool(torch.is_deterministic_algorithms_warn_only_enabled()),
        cudnn_deterministic=bool(cudnn.deterministic),
        cudnn_benchmark=bool(cudnn.benchmark),
        matmul_precision=precision_of_products(torch),
    )


def precision_of_products(torch: Any) -> str:
    """Return how precise products of float32 matrices shall be, in the words of whichever of torch's two settings was used.

    torch refuses to tell the older one once the newer one was set (``aten/src/ATen/Context.cpp``).

    Example:
        >>> import torch
        >>> precision_of_products(torch)
        'highest'
    """
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)
