"""The Python face of the runbook's second half: is this device worth it? Each function calls one verb of the session."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..runbook.sweep_search import KNEE_GAIN, SECONDS, SweepRules
from ..session import SESSION
from . import verbs

if TYPE_CHECKING:
    from ..runbook.comparison import Comparison
    from ..runbook.profile import Profile
    from ..runbook.sweep import SweepReport


def sweep(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    training: bool = False,
    device: str | None = None,
    length: int | None = None,
    largest: int | None = None,
    seconds: float = SECONDS,
    gain: float = KNEE_GAIN,
    smallest: int | None = None,
    **arguments: Any,
) -> SweepReport:
    """Find the batch size from which larger batches no longer pay, on a device, and what each size takes of its memory.

    Rows are doubled until two doublings in a row gain too little, until the memory is expected to come near its limit, or
    until a batch does not fit; then sizes around the best are bisected, and those near the best are measured again in turn.
    Every size has one shape. Its first pass and the warm-up are not among the times.

    Args:
        model: The name of a model, ``None`` for the bundled one; a pipeline of :func:`load_pipeline`; a torch module; or a
            function that does a step of your own with a batch.
        data: For a module, example inputs or a ``DataLoader``, whose first batch is repeated or cut to each size: every tensor
            of it whose first size is the number of its rows, so that a mask of 4 times 4 wants an example of another number
            of rows; for a function, another one that makes a batch of a number of rows: ``nb.sweep(step, make_batch).knee``.
        training: Whether training steps are measured: forward, backward and AdamW, on a copy of the model.
        device: The device; ``None`` is the session's.
        length: How many tokens a row has, for a name or a pipeline; 128, or as many as the model reads.
        largest: The most rows that are tried.
        seconds: About how long it may take; 30 where nobody says.
        gain: A larger batch pays that gives more than this share more throughput; 0.03 where nobody says.
        smallest: The rows that are tried first; ``None`` for 1, or for 2 in training, because BatchNorm does not learn from a
            single row.
        arguments: For a name, those of :meth:`ModelLoader.load_model`, such as ``revision``.

    Returns:
        The report: ``knee``, a number of rows, ``None`` where not even one row fits; ``batch_tokens``, the same in tokens where
        texts are annotated, for ``nb.annotate(notes, batch_tokens=sweep.batch_tokens)``; ``why``, in a sentence; ``points``, with
        ``rows``, ``throughput`` in rows a second, its quartiles ``spread``, ``memory`` in bytes, ``first_seconds`` and
        ``fits``; ``limit`` in bytes; and ``plot()``. Its text form has the knee and no other figure.

    Raises:
        ConfigurationError: For what cannot be measured, for data that are none, and for numbers out of their range.
        ModelError: Where the model cannot be loaded.
        DeviceError: Where the device cannot be used.

    Out of memory is a point with ``fits=False``, and the caches of the device are emptied after it. What a step raises beside
    that passes through. Models are loaded for the sweep and let go after it; the session, a model of yours and random
    numbers stay as they are; hooks of a model of yours run in its copy. A function of your own changes what it changes.

    Example:
        >>> import torch
        >>> report = sweep(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", largest=4)
        >>> [point.rows for point in report.points], report.knee in (1, 2, 3, 4)
        ([1, 2, 3, 4], True)
    """
    from ..runbook.measure.benches import Asked

    rules = SweepRules(gain, largest, seconds, smallest)
    return verbs.sweep(SESSION, Asked(model, data, training, length, arguments, device), rules)


def compare(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    devices: Any = None,
    training: bool = False,
    batch_size: int | None = None,
    pairs: int = 20,
    seconds: float = 6.0,
    **arguments: Any,
) -> Comparison:
    """Do the same work on each device in one run, in turn: how much faster than the CPU, and where the time goes.

    Each device has its turns at full speed, data included, and the speed-up is the median of the ratios to the CPU of all
    rounds, with an interval that assumes nothing of how times are distributed. Then steps are waited for phase by phase, and
    at last each device works without a pause while the system is asked how busy it is.

    Args:
        model: The name of a model, ``None`` for the bundled one; a pipeline of :func:`load_pipeline`; or a torch module.
        data: Texts for a name or a pipeline; example inputs or a ``DataLoader`` for a module or for training. Synthetic texts
            where nobody says.
        devices: The devices beside the CPU, which is always among them; ``None`` for all that can be used.
        training: Whether training steps are compared: forward, backward and AdamW, on copies of the model.
        batch_size: How many texts, or rows, a step has; 32 texts, or as many rows as the example or the loader has. Texts
            run on a device in batches of tokens: of 128 for each text of a ``batch_size`` that is passed, which is what
            :func:`sweep` measures; without one, of as many as suit the device. The result says it as ``batch_tokens``.
        pairs: How often each device has its turn, from 6.
        seconds: How long each device is watched while it works, and as long before while it does not, up to twice as long
            where there are too few answers for a mean by then; 0 to leave ``utilisation`` out.
        arguments: For a name, those of :meth:`ModelLoader.load_model`, such as ``revision``.

    Returns:
        The comparison: ``of("mps")`` has ``speed_up`` with ``low``, ``middle`` and ``high`` (1.22 is 22 % faster), ``speed`` in
        words, ``seconds``, ``rows_per_second``, ``shares`` of the phases, ``split.dominating``, and ``utilisation`` from 0 to 1
        without what the device does when idle, ``None`` where it cannot be read; ``findings`` says it in words. Its text has
        no times.

    Raises:
        ConfigurationError: For a function, which cannot be put on devices, and for data and numbers that are none.
        ModelError: Where the model cannot be loaded.
        DeviceError: Where a device cannot be used, or a batch does not fit in its memory.

    Models are loaded for the comparison and let go after it; the session, a model of yours and random numbers stay as they
    are; hooks of a model of yours run in its copies. Utilisation is that of all processes together: on a Mac ``ioreg`` says it, on CUDA ``nvidia-smi``, and of the CPU
    psutil, once a second. Under a simulated MPS device nothing of it is read.

    Example:
        >>> import torch
        >>> comparison = compare(torch.nn.Linear(8, 8), torch.ones(2, 8), devices="cpu", pairs=6, seconds=0)
        >>> list(comparison.of("cpu").shares), comparison.of("cpu").speed_up is None
        (['data', 'transfer', 'forward'], True)
    """
    from ..runbook.measure.benches import Asked

    asked = Asked(model, data, training, None, arguments)
    return verbs.compare(SESSION, asked, devices, batch_size=batch_size, pairs=pairs, seconds=seconds)


def profile(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    steps: int = 50,
    warm_up: int = 5,
    training: bool = False,
    device: str | None = None,
    batch_size: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    signposts: bool = False,
    metal_capture: str | None = None,
    **arguments: Any,
) -> Profile:
    """Look at some steps closely: where their time goes, which lines wait for the device, which operators take long.

    After the warm-up, steps are timed at full speed and phase by phase; then their data alone, and the same batch again and
    again; then some run under torch's profiler; and at last a few are watched for what they call, which slows them and is not
    timed. In turn with them run operators that have nothing to compute: a batch is tiny if more than half of a step goes into
    starting operators.

    Args:
        model: The name of a model, ``None`` for the bundled one; a pipeline of :func:`load_pipeline`; a torch module; or a
            function that does a step of your own with a batch, which is run as it is and changes what it changes.
        data: Texts for a name or a pipeline; example inputs or a ``DataLoader`` for a module or for training; batches for a
            function, or another function that makes a batch of a number of rows. Synthetic texts where nobody says.
        steps: How many steps torch's profiler sees. The series of times have as many, or fewer where they are slow.
        warm_up: How many steps come before any that counts.
        training: Whether training steps are profiled: forward, backward and AdamW, on a copy of the model.
        device: The device; ``None`` is the session's.
        batch_size: How many texts, or rows, a step has; 32 texts, or as many rows as the example or the loader has. Texts
            run on a device in batches of tokens: of 128 for each text of a ``batch_size`` that is passed, which is what
            :func:`sweep` measures; without one, of as many as suit the device. The result says it as ``batch_tokens``.
        trace: A file for the trace of the profiled steps in the format of Chrome, such as ``"trace.json"``; it is written over.
            It has no code, shapes or text, but torch writes the name of the computer into it.
        signposts: On MPS, whether the profiled steps leave signposts for Instruments (``torch.mps.profiler.profile``).
        metal_capture: On MPS, the name under which one step's Metal calls are captured for Xcode
            (``torch.mps.profiler.metal_capture``, since torch 2.7, where ``MTL_CAPTURE_ENABLED=1`` was set before Python began).
        arguments: For a name, those of :meth:`ModelLoader.load_model`, such as ``revision``.

    Returns:
        The profile: ``findings``, named ``"data"``, ``"synchronisation"``, ``"tiny batch"`` and ``"fallback"``; ``bottlenecks``,
        the names of those that warn; ``seconds``, ``data_only``, ``compute_only`` and ``shares`` of the phases;
        ``synchronisations`` with call, file, line and count; ``operators`` by time; and ``save("profile.json")``, in the schema
        that ``to_dict()["schema"]`` names. Its text has no times, no path and no word of a text.

    Raises:
        ConfigurationError: For what cannot be measured, for data and numbers that are none, for a file that cannot be written,
            for signposts and captures where torch has none, and while another profiler of torch is on.
        ModelError: Where the model cannot be loaded.
        DeviceError: Where the device cannot be used, or a batch does not fit in its memory.

    Calls that wait, such as ``.item()``, ``.cpu()`` or printing a tensor, are named with the line of your own code; inside of
    a model of a library, the library's module is named and nothing warns. On the CPU nothing waits, and the lines are named that
    would on a GPU. torch's profiler sees no kernels of MPS: there, the times of operators are those of the host. What
    ``torch.compile`` made is watched uncompiled. Hooks of a model of yours run in its copy.

    Example:
        >>> import torch
        >>> found = profile(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", steps=3)
        >>> [one.name for one in found.findings], found.operators_per_step
        (['data', 'synchronisation', 'tiny batch', 'fallback'], 1.0)
    """
    from ..runbook.measure.benches import Asked

    return verbs.profile(
        SESSION,
        Asked(model, data, training, None, arguments, device),
        steps=steps,
        warm_up=warm_up,
        batch_size=batch_size,
        trace=trace,
        signposts=signposts,
        metal_capture=metal_capture,
    )
