"""The Python face of the runbook: is this device right? Each function calls one verb of the session."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..session import SESSION
from . import verbs

if TYPE_CHECKING:
    from ..runbook.precision.gate import PrecisionVerdict
    from ..runbook.precision.parity import ParityReport
    from ..runbook.signals.values import Signals


def parity(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    gold: Iterable[Any] | None = None,
    gradients: bool = False,
    **arguments: Any,
) -> ParityReport:
    """Compare a model on a device, in a type, with the same model on the CPU in float32: logits, labels and entities.

    Both read the same tokens, windows and padded batches, which are made on the CPU; nothing is truncated. The models are
    loaded for the comparison and let go after it: those of the session, and its device, stay as they are.

    Args:
        model: An alias, a hub id, a bare name, a folder, ``None`` for the bundled model; or a pipeline of
            :func:`load_pipeline`, which is compared as it is with a float32 copy of its model on the CPU.
        texts: Any series of texts, at least one.
        device: The device of the candidate; ``None`` is the session's.
        dtype: Its type: ``"float32"`` (also the default), ``"float16"``, ``"bfloat16"``, ``"int8"`` on the CPU, or ``"auto"``.
        gold: For each text its true entities, as ``(start, end, label)`` or as mappings like those of :func:`annotate`;
            both ways are scored against them, with borders and labels exact.
        gradients: Whether the gradients of one training step are compared too: without dropout, against the labels that
            the reference itself gives.
        arguments: For a name, those of :meth:`ModelLoader.load_model`, such as ``revision``.

    Returns:
        Counts, figures and what they mean. Its text form has no figure that differs from run to run; no form of it has a
        word of a text, and where entities differ, it names numbers of texts and characters.

    Raises:
        ConfigurationError: For no text, for gold that is none or of other texts, for gradients in int8, and for a type that
            the device does not have.
        UnreadableText: For a text that cannot be read, by its number.
        ModelError: Where the model cannot be loaded, or computes no numbers on the CPU in float32.
        DeviceError: Where the device cannot be used, or fails.

    Example:
        >>> report = parity("bundled_small", ["She has asthma.", "No fever."], device="cpu", dtype="bfloat16")
        >>> report.spans.exact, report.spans.missing, report.findings[0].evidence
        (2, 0, 'every logit is a number')
    """
    named = {"device": device, "dtype": dtype, **arguments}
    given = {name: value for name, value in named.items() if value is not None}
    return verbs.parity(SESSION, model, texts, given, gold=gold, gradients=gradients)


def signals() -> Signals:
    """Read load, memory pressure, swap, power source, Low Power Mode and heat of this computer, without administrator rights.

    Returns:
        The signals of this moment; what cannot be read is ``None`` and shown as "not known", never a guess. ``gpu`` is
        the GPU of the device in force. Its text form has the states in words only; the figures stand in the HTML.

    On macOS the system's own commands are asked (``ioreg``, ``sysctl``, ``memory_pressure``, ``pmset``), on CUDA
    ``nvidia-smi``, elsewhere psutil; each may take up to two seconds, and torch is not loaded. Figures of a GPU are those
    of all processes together. Under a simulated MPS device nothing is read.

    Example:
        >>> signals().memory_available > 0
        True
    """
    return verbs.signals(SESSION)


def validate_precision(
    model: str | None = None,
    texts: Iterable[Any] | None = None,
    dtype: str = "bfloat16",
    *,
    device: str | None = None,
    gold: Iterable[Any] | None = None,
    **arguments: Any,
) -> PrecisionVerdict:
    """Measure on your own texts whether a model keeps its entities in a reduced type, and remember it where it does.

    It is accepted where at least 99 percent of the entities are the same as on the CPU in float32, in the aggregation
    strategy that loses most, and where at most one percent of the gold entities is lost; of at least 50 entities, 10 of them
    different, in 20 texts of different words. Then a certificate is stored in the folder that ``OPENMED_NB_DATA``
    names, else in the system's place for such things: it holds counts and fingerprints, no word of a text.
    ``dtype="auto"`` takes the type from then on where nearly every reading was faster than float32, and loading the model in
    this type warns no more. It counts for these very files on this device with this torch and transformers, as long as its
    counts are enough for what is asked for. Where something speaks against the type, which too few texts do not, an older
    certificate of the same is removed. A text whose words come again, with other numbers or spaces, does not count.

    Args:
        model: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
        texts: Any series of texts, such as those that it will read; they are held in memory.
        dtype: ``"bfloat16"``, ``"float16"``, or ``"int8"`` on the CPU.
        device: The device; ``None`` is the session's.
        gold: As for :func:`parity`, with labels of the model alone.
        arguments: Those of :meth:`ModelLoader.load_model`, such as ``revision``.

    Returns:
        The verdict with its reasons, what was measured, and the certificate.

    Raises:
        ConfigurationError: As for :func:`parity`, for a pipeline, which is no file, and where a certificate cannot be stored.
        UnreadableText, ModelError, DeviceError: As for :func:`parity`.

    Example:
        >>> validate_precision("bundled_small", ["She has asthma."], dtype="float64")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'float64' is no reduced type. Use one of bfloat16, float16, int8.
    """
    given = {**arguments, **({} if device is None else {"device": device})}
    return verbs.validate_precision(SESSION, model, texts, dtype, given, gold)
