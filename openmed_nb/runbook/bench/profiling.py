"""``nb.runbook.profile``: where the time of a few steps goes, which lines wait for the device, and what holds the steps up."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from ..._events.activity import Activity
from ..._utils.plain import utc
from ..._utils.text import describe_file, short_type_name
from ..._utils.validation import check_flag, whole, whole_or_none
from ...devices import profilers
from ...devices.registry import device_of
from ...errors import ConfigurationError
from ...session import SESSION
from .profile_report import Profile
from .workloads import Workload, next_batch, put_on_devices, series

MOST_OPERATORS = 30  # How many are kept.
STEPS, WARM_UP = 50, 5
PARTS = 6  # What a profile is made of, one after the other.


def profile(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    training: bool = False,
    device: str | None = None,
    batch_size: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    signposts: bool = False,
    metal_capture: str | None = None,
    progress: bool = True,
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
        metal_capture: On MPS, the name under which one step's Metal calls are captured for Xcode, such as ``"step"``, for which
            torch writes ``0000-step.gputrace`` in the current folder; the number counts the captures of this process
            (``torch.mps.profiler.metal_capture``, since torch 2.7, where ``MTL_CAPTURE_ENABLED=1`` was set before Python began).
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: For a name, those of :func:`openmed_nb.load_model`, such as ``revision``.

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
    a model of a library, the library's module is named and nothing warns. A copy to the device waits for all that was started
    there (torch's ``MPSStream::copy_and_sync`` and, on CUDA, ``memcpy_and_sync``): that of the batch, before a step computes, is
    named and does not warn. On the CPU nothing waits, and the lines are named that
    would on a GPU. torch's profiler sees no kernels of MPS: there, the times of operators are those of the host. What
    ``torch.compile`` made is watched uncompiled. Hooks of a model of yours run in its copy.

    Example:
        >>> import torch
        >>> found = profile(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", steps=3)
        >>> [one.name for one in found.findings], found.operators_per_step
        (['data', 'synchronisation', 'tiny batch', 'fallback'], 1.0)
    """
    from .benches import subject_of  # It imports numpy.

    check_flag("signposts", signposts)
    steps, warm_up = whole("steps", steps), whole("warm_up", warm_up, 0)
    batch_size, file = whole_or_none("batch_size", batch_size), checked_trace(trace)
    capture = None if metal_capture is None else profilers.capture_name(metal_capture)
    with SESSION.told_after(progress):
        subject, place = subject_of(model, data, training=training, device=device, arguments=arguments)
        profilers.check_no_profiler()
        if signposts:
            profilers.check_signposts(place)
        if capture is not None:
            profilers.check_metal_capture(place)
        with put_on_devices(subject, [place]) as benches:
            return profiled(benches[place].stream(batch_size), place, steps, warm_up, file, signposts, capture)


def checked_trace(trace: Any) -> Path | None:
    """Return where a trace will be written; anything but a file of JSON in a folder that takes files is an error.

    Example:
        >>> checked_trace("trace.txt")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A trace cannot be written to 'trace.txt'. Use a name that ends in .json or .json.gz.
    """
    if trace is None:
        return None
    name = os.fspath(trace) if isinstance(trace, (str, os.PathLike)) else ""
    if not str(name).endswith((".json", ".json.gz")):
        shown = describe_file(Path(name)) if name else short_type_name(trace)
        raise ConfigurationError(f"A trace cannot be written to {shown}.", "Use a name that ends in .json or .json.gz.")
    file = Path(name)
    try:  # torch's profiler says nothing if it cannot write.
        with tempfile.TemporaryFile(dir=file.parent):
            writable = not file.is_dir() and (not file.exists() or os.access(file, os.W_OK))
    except OSError:
        writable = False
    if not writable:
        raise ConfigurationError(
            f"{describe_file(file)} cannot be written there.", "Make the folder, or use another one."
        )
    return file


def profiled(  # noqa: PLR0913, PLR0917 - what a person asked for
    workload: Workload,
    device: str,
    steps: int,
    warm_up: int,
    trace: Path | None,
    signposts: bool,
    capture: str | None,
) -> Profile:
    """Return the profile of steps that are ready."""
    from .profile_watch import CALLS, WATCHED, empty_operators, operators_of, total, watched

    def tell(done: int) -> None:
        SESSION.tell(Activity("Profiling", workload.name, done, PARTS, "part"))

    tell(0)
    empty = empty_operators(device)
    known = device_of(device)
    with workload.begun() as batches:
        batch = next(batches)
        for _ in range(warm_up):
            workload.seconds_of_steps(batches)
        workload.settle(batches)
        tell(1)
        seconds = series(lambda: workload.seconds_of_steps(batches), steps)
        workload.settle(batches)
        tell(2)
        split = workload.split(batches, steps)
        workload.drop_ready(batches)
        tell(3)
        data = series(lambda: next_batch(batches)[1], steps)
        turns = series(lambda: (workload.seconds(batch), empty.seconds(None)), steps)
        tell(4)
        with profilers.signposts() if signposts else contextlib.nullcontext():
            operators = operators_of(workload, batches, steps, trace, None if known.is_accelerator else empty)
        if capture is not None:
            with profilers.metal_capture(capture):
                workload.run(batch)
        tell(5)
        per_step, waits, fell = watched(workload, batches)
    tell(PARTS)
    compute, started = (statistics.median(seconds) for seconds in zip(*turns, strict=True))
    starting = total(operators, "starting_seconds")
    if known.is_accelerator and not known.profiler_times_kernels:
        starting = per_step * started / CALLS
    return Profile(
        **workload.facts,
        device=device,
        rows=workload.usual_rows,
        steps=steps,
        warm_up=warm_up,
        seconds=statistics.median(seconds),
        split=split,
        data_only=workload.typical(data),
        compute_only=compute,
        operators=operators[:MOST_OPERATORS],
        operators_per_step=per_step,
        device_seconds=total(operators, "device_seconds", with_data=True),
        synchronisations=waits,
        fallbacks=fell,
        watched=WATCHED,
        batch_tokens=workload.batch_tokens,
        operator_seconds=None if known.is_accelerator else (total(operators, "seconds") or 0.0),
        starting_seconds=starting,
        written=utc(),
    )
