"""The gates, shown with their reference: the decision matrix, which is the rules, and a table of symptoms."""

from __future__ import annotations

import textwrap
from dataclasses import fields, replace
from itertools import zip_longest

from ...display import Report, Shown, Table, to_text
from ...errors import ConfigurationError, offered, shorten
from .gates import DEFAULTS, UNITS, Thresholds, in_unit
from .rules import MATRIX

# How many characters a line of the text form has at most, but for the spaces between columns.
WIDTH = 108

# What a person sees, the likely cause, what to look at, with which tool, and who reported it.
SYMPTOMS = (
    (
        "PYTORCH_ENABLE_MPS_FALLBACK=1 has no effect",
        "torch reads it while its library loads, so setting it later comes too late",
        "what was set before torch was imported",
        "nb.doctor(), nb.device()",
        "pytorch#86195, accelerate#3294",
    ),
    (
        "invalid low watermark ratio",
        "the low ratio is above the high one, such as the default 1.4 above a high of 0.7",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO and PYTORCH_MPS_LOW_WATERMARK_RATIO together",
        "nb.doctor()",
        "kohya-ss/sd-scripts#603",
    ),
    (
        "MPS is not available, or torch is slow on Apple Silicon",
        "a Python for Intel runs under Rosetta, or there is no Metal device, as in a virtual machine",
        "the architecture of Python, not the version of macOS that torch names",
        "nb.doctor()",
        "pytorch#146236, #177819",
    ),
    (
        "memory grows with each epoch",
        "tensors are retained, such as a list of losses with their graphs",
        "growth of tensors after each epoch",
        "nb.epochs(...), nb.training.who_holds()",
        "pytorch#77753",
    ),
    (
        "memory grows although no tensor is retained",
        "batches of ever new lengths: the allocator and the graphs of MPS keep something for each shape",
        "reserved memory with fixed lengths",
        "nb.training.last_curve(), padding to a few lengths",
        "pytorch#132596, #181213, #121113",
    ),
    (
        "memory stays taken after an error",
        "the traceback holds the frames, and they hold tensors",
        "sys.last_traceback and Out",
        "nb.release()",
        "pytorch#27600",
    ),
    (
        "MPS backend out of memory",
        "the batch, or one long text, goes beyond the high watermark",
        "peak memory for each batch size",
        "nb.sweep(), nb.training.checkpoint_activations()",
        "accelerate#4226, ultralytics#22621",
    ),
    (
        "other entities or metrics than on the CPU",
        "an operator of MPS gives wrong numbers without an error",
        "logits and entities beside the CPU's, before anything else",
        "nb.runbook.parity(), nb.doctor()",
        "transformers#19353, pytorch#82707, #177116",
    ),
    (
        "the loss is fine and nothing is learnt",
        "labels or ids out of range, which MPS takes in silence and the CPU refuses",
        "the largest label and id of each batch, on the CPU",
        "nb.Guards, nb.training.loader.check()",
        "pytorch#144824, keras#23664",
    ),
    (
        "the GPU is hardly busy",
        "small batches: starting an operator takes 25 to 110 microseconds, whatever its size",
        "throughput at larger batches",
        "nb.sweep(), nb.runbook.profile()",
        "pytorch#82707, #122973, py-feat#296",
    ),
    (
        "the first batches are slow, and again after each new length",
        "MPS compiles graphs for each shape",
        "the first pass of a shape apart from the later ones",
        "nb.sweep(), padding to a few lengths",
        "pytorch#132596",
    ),
    (
        "steps wait while the processor reads",
        "one process reads and tokenises, and the GPU waits for it",
        "the share of a step that is spent on data",
        "nb.compare(), nb.training.loader.ladder()",
        "pytorch#70344, #46648",
    ),
    (
        "workers do not start, or hang, in a notebook",
        "macOS starts them anew, and a class of a cell cannot be found there",
        "where the Dataset is defined",
        "nb.training.loader.check(), nb.training.loader.settings()",
        "MONAI#3928, minimind#852",
    ),
    (
        "a warning that pin_memory is not supported",
        "MPS has no pinned memory, and the loader asks for it",
        "the settings of the loader, also where the CPU was chosen",
        "nb.training.loader.settings()",
        "pytorch#86060, torchgeo-bench#253",
    ),
    (
        "wrong data on MPS now and then",
        "non_blocking=True: the copy reads memory that is already used for something else",
        "copies to the device",
        "nb.training.to_device()",
        "pytorch#189690, #139550",
    ),
    (
        "one warning that an operator falls back, and slow steps",
        "torch warns of the first operator only, and there may be more",
        "all operators that leave MPS",
        "nb.runbook.fallbacks(), nb.runbook.forecast()",
        "pytorch#141287",
    ),
    (
        "float64 is refused",
        "Metal has no float64",
        "buffers and inputs made by numpy",
        "nb.training.to_device(), nb.runbook.forecast()",
        "pytorch#122602",
    ),
    (
        "bfloat16 is no faster on M1 and M2",
        "those chips have no bfloat16, and it is emulated",
        "the throughput in both types, and the entities",
        "nb.runbook.validate_precision()",
        "transformers#40458",
    ),
    (
        "the same step gets slower and slower, or other times each day",
        "battery, Low Power Mode or heat",
        "the state of the computer right before it is measured",
        "nb.signals(), nb.logbook()",
        "Rapid-MLX#3146, ANEForge#139, Layr-Labs#573",
    ),
    (
        "several threads, and the kernel dies",
        "two threads that compute on MPS at once",
        "what else runs in the notebook",
        "one thread for all tensors",
        "pytorch#197805",
    ),
)


class Gates(Thresholds, Shown):
    """The thresholds of a verdict, shown with the decision matrix and a table of symptoms; see :class:`.gates.Thresholds`."""

    def report(self) -> Report:
        """Return the thresholds with their reasons, and as reference the decision matrix and the symptoms."""
        were = {name: f"was {in_unit(UNITS[name], was)}" for name, was, _ in self.changed}
        thresholds = tuple(
            (
                one.name,
                self.shown()[one.name],
                were.get(one.name, ""),
                *(one.metadata[name] for name in ("says", "reason", "source")),
            )
            for one in fields(self)
        )
        rules = tuple((str(number), *rule.row(self.shown())) for number, rule in enumerate(MATRIX, 1))
        symptoms = tuple((symptom, cause, f"{look}: {tool}", source) for symptom, cause, look, tool, source in SYMPTOMS)
        matrix = "Decision matrix: of the rules that hold, the first decides"
        tables = (
            Table("Thresholds", ("gate", "value", "changed", "what it says", "why", "who says so"), thresholds),
            Table(matrix, ("", "when", "recommendation", "what to do", "what would change it"), rules),
            Table("Symptoms", ("symptom", "likely cause", "what to look at, and with what", "reported in"), symptoms),
        )
        sentences = self.changes or ("No threshold was changed; nb.runbook.gates(speed_up=0.3) changes one.",)
        return Report("Gates", sentences, tables)

    def __str__(self) -> str:
        report = self.report()
        return to_text(replace(report, tables=tuple(map(narrow, report.tables))))


def gates(**changed: float) -> Gates:
    """Return the thresholds of :func:`verdict`, each with its reason, and some of them changed.

    Args:
        changed: New values by name, as fractions: ``speed_up=0.3`` asks for 30 % more speed than the CPU has. The names are
            the attributes of the result; printing it shows all with their reasons, the decision matrix, and a table of
            symptoms with their likely causes.

    Returns:
        The thresholds, for ``nb.verdict(..., gates=...)``; ``changed`` says which are not as they were given.

    Raises:
        ConfigurationError: For an unknown name, and for a value that makes no sense.

    Example:
        >>> gates(speed_up=0.3).changed, gates().memory_growth
        ((('speed_up', 0.22, 0.3),), 0.26)
        >>> gates(speedup=0.3)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There is no gate 'speedup'. Did you mean 'speed_up'?
    """
    for name in changed:
        if name not in DEFAULTS:
            raise ConfigurationError(f"There is no gate {shorten(name)!r}.", offered(name, DEFAULTS))
    return Gates(**changed)


def narrow(table: Table) -> Table:
    """Return a table without long lines: long cells go on in the rows below, and an empty row ends each.

    Example:
        >>> narrow(Table("", ("a", "b"), (("1", "word " * 23),))).rows
        (('1', 'word word word word word word word word word word word word word word word word word word word word word'),\
 ('', 'word word'), ('', ''))
    """
    columns = list(zip(table.columns, *table.rows, strict=True))
    words = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
    wide = [max(map(len, column)) > longest for column, longest in zip(columns, words, strict=True)]
    more = (WIDTH - sum(words)) // max(1, sum(wide))
    widths = [longest + more if breaks else longest for longest, breaks in zip(words, wide, strict=True)]
    rows = (
        row
        for cells in table.rows
        for row in (*zip_longest(*map(broken, cells, widths), fillvalue=""), ("",) * len(cells))
    )
    return replace(table, rows=tuple(rows))


def broken(cell: str, width: int) -> list[str]:
    """Return a cell as lines, broken between words."""
    return textwrap.wrap(cell, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]
