"""IPython magics: each parses its line, calls one operation of the session and returns a value that displays itself.

A magic can be assigned: ``choice = %openmed_device cpu``. Every invalid line raises an ``OpenMedError``. ``--help``
describes a magic, and ``%openmed`` lists all of them.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
    output_can_be_silenced,
)
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.utils.process import arg_split
from IPython.utils.text import DollarFormatter
from traitlets import Bool, Enum, Unicode, observe

from .._render.values import Displayable, Json, Report, Table, pluralize, to_plain_data
from .._utils.text import describe_file, describe_value, parser_problem, short_type_name
from .._utils.validation import check_path, suggest_one
from ..devices.choice import DeviceList, gpu_reasons_table
from ..devices.machine import DEFAULT_SIMULATED_MEMORY
from ..errors import MagicError, OpenMedError
from ..models.config import DEFAULT_STRATEGY, STRATEGIES
from ..session import SESSION

if TYPE_CHECKING:
    from .preload import Preloader

# Each line of the cheat sheet with its description. ``--help`` prints the lines of one magic as examples.
CHEAT_SHEET_ROWS = tuple(json.loads(Path(__file__).with_name("cheat_sheet.json").read_text("utf-8")).items())

# Lines that a computer without MPS needs only to simulate it.
MPS_ROWS = tuple(row for row in CHEAT_SHEET_ROWS if "--simulate" in row[0] or "--ops" in row[0])

# A word of a line, which may contain quoted text with spaces.
_WORD_PATTERN = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[^\s"'])+)""")

_QUOTED_PATTERN = re.compile(r"([\"'])(.*?)\1", flags=re.DOTALL)

# A comment, or quoted text, which may be unterminated and in which "#" does not start a comment.
_COMMENT_PATTERN = re.compile(r"""("[^"]*(?:"|$)|'[^']*(?:'|$))|(?:^|(?<=[\s;]))#.*""", flags=re.DOTALL)

_json = argument("--json", action="store_true", help="return the result as JSON")


def _parsed_magic(command: Callable[..., object]) -> Any:
    """Return a magic that parses its line and calls a command with the arguments.

    ``--help`` prints the usage, and ``--json`` returns the result as JSON. If the command has a parameter ``text``, the
    rest of the line after the options is passed to it unchanged.
    """
    takes_text = "text" in inspect.signature(command).parameters

    @argument("-h", "--help", action="store_true", help="show this help message")
    @no_var_expand  # IPython would keep an undefined name unchanged; _expand_variables() raises an error.
    @needs_local_scope
    @wraps(command)
    def magic(self: Magics, line: str, *cell: str, local_ns: Mapping[str, object] | None = None) -> object:
        line = _expand_variables(line, {**self.shell.user_ns, **(local_ns or {})})
        options, text = split_options(magic.parser, line) if takes_text else (line, "")
        arguments = parse_line(magic, options)
        if arguments.help:
            _print_help(magic)
            return None
        result = command(self, arguments, text, *cell) if takes_text else command(self, arguments, *cell)
        return Json.of(to_plain_data(result)) if getattr(arguments, "json", False) else result

    return magic


def _print_help(magic: Callable[..., object]) -> None:
    """Print the usage of a magic and its lines of the cheat sheet."""
    print((magic.__doc__ or "").removeprefix("::").strip())
    rows = [row for row in CHEAT_SHEET_ROWS if row[0].split()[0].lstrip("%") == magic.__name__]
    if rows:
        print("\nexamples:")
    width = max((len(line) for line, _ in rows), default=0)
    for line, description in rows:
        print(f"  {line:{width}}  {description}")


def _parsed_line_magic(command: Callable[..., object]) -> Any:
    """Return a line magic for a command; a trailing semicolon suppresses the display of its result."""
    return output_can_be_silenced(line_magic(_parsed_magic(command)))


_PRICE = "\ue000"  # Stands for the dollar sign of a price while variables are replaced.


def _expand_variables(line: str, namespace: dict[str, object]) -> str:
    """Return a line with ``{expression}`` and ``$name`` replaced by their values, as IPython does.

    An expression in braces that raises is an error. Otherwise the braces would be annotated as part of a note. Braces
    without valid Python and a dollar sign before an undefined name remain unchanged.

    Example:
        >>> _expand_variables("--model {name} {{x}} {type 2 diabetes} $cost", {"name": "bundled"})
        '--model {name} {{x}} {type 2 diabetes} $cost'
        >>> _expand_variables("{name} since {year + 1}, $cost", {"name": "Asthma", "year": 2019})
        'Asthma since 2020, $cost'
        >>> _expand_variables("{nmae}", {"name": "Asthma"})
        Traceback (most recent call last):
        ...
        openmed_nb.errors.MagicError: Undefined variable: 'nmae'. Define it first, or write {{ and }} for literal braces.
    """
    formatter = DollarFormatter()
    braces = "or write {{ and }} for literal braces."
    # The formatter reads "$20" as an expression, and the dot after "$name." as a part of the name.
    prepared = re.sub(r"\$(?=[\d.])", _PRICE, line)
    for name in re.findall(r"(?<!\$)\$([^\W\d]\w*)(?=\.+(?!\w))", line):
        if name in namespace:
            prepared = re.sub(rf"\${name}(?=\.+(?!\w))", f"{{{name}}}", prepared)
    try:
        for _, field, rest, _ in formatter.parse(prepared):
            if field is not None:
                compile(f"{field}:{rest}".removesuffix(":").strip(), "", "eval")
    except (SyntaxError, ValueError):
        return line
    for name in re.findall(r"\$([^\W\d]\w*)", line):
        if not re.search(rf"{{[^{{}}]*\b{name}\b", line):
            namespace.setdefault(name, f"${name}")
    try:
        return str(formatter.vformat(prepared, args=[], kwargs=namespace)).replace(_PRICE, "$")
    except Exception as error:  # noqa: BLE001 - the code in the braces can raise anything
        name = getattr(error, "name", None)
        if isinstance(error, NameError) and name and name not in namespace and re.search(rf"\b{name}\b", line):
            raise MagicError(f"Undefined variable: {describe_value(name)}.", f"Define it first, {braces}") from None
        raise MagicError(f"An expression in braces raised {short_type_name(error)}.", f"Correct it, {braces}") from None


def split_options(parser: argparse.ArgumentParser, line: str) -> tuple[str, str]:
    """Return the options at the start of a line and the unchanged text after them.

    The text starts at the first word without a leading dash, at a single dash, or after ``--``.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> _ = parser.add_argument("--model")
        >>> split_options(parser, "--model 'my model' The patient's asthma; # 2")
        ("--model 'my model'", "The patient's asthma; # 2")
        >>> split_options(parser, "-- -HIV positive"), split_options(parser, "- asthma")
        (('', '-HIV positive'), ('', '- asthma'))
    """
    options = parser._option_string_actions  # noqa: SLF001 - argparse has no public list of its options
    position = 0
    while (word := _WORD_PATTERN.match(line, position)) and word[1].startswith("-") and word[1] != "-":
        if word[1] == "--":
            return line[:position], line[word.end() :].strip()
        position = word.end()
        takes_value = word[1] in options and options[word[1]].nargs != 0
        if takes_value and (value := _WORD_PATTERN.match(line, position)):
            position = value.end()
    return line[:position], line[position:].strip()


def parse_line(magic: Callable[..., object], line: str) -> argparse.Namespace:
    """Return the arguments of a magic, ignoring a comment and a semicolon at the end of the line, as Python does."""
    parser: argparse.ArgumentParser = magic.parser  # type: ignore[attr-defined]  # set by magic_arguments
    options = parser._option_string_actions  # noqa: SLF001 - argparse has no public list of its options
    try:
        arguments, unknown = parser.parse_known_args(split_words(line))
    except (UsageError, ValueError) as error:
        raise _usage_error(
            magic, f"The arguments of %{magic.__name__} could not be parsed: {parser_problem(str(error))}."
        ) from None
    # argparse parses "--option=--" as an empty list, and from Python 3.13 on as two dashes.
    if any(getattr(arguments, option.dest) in ([], "--") for option in options.values()):
        raise _usage_error(magic, f"%{magic.__name__} received an option without its value.")
    if flags := [word for word in unknown if word.startswith("-")]:
        remedy = suggest_one(flags[0], options)
        if not remedy and magic.__name__ == "openmed_ner":  # The word may be part of a note, such as "-HIV".
            remedy = "Write -- before a text that starts with a dash."
        raise _usage_error(magic, f"%{magic.__name__} received an unknown option.", remedy)
    if unknown:  # The words may be part of a note, so the error must not quote them.
        unexpected = pluralize(len(unknown), "unexpected argument")
        raise _usage_error(magic, f"%{magic.__name__} received {unexpected}.")
    return arguments


def split_words(line: str) -> list[str]:
    r"""Return the words of a line, without the quotes around a word with spaces.

    A backslash is kept, because it separates directories in Windows paths.

    Example:
        >>> split_words("--model 'my models/mine' --device=\"cpu\" ; # the slow one")
        ['--model', 'my models/mine', '--device=cpu']
    """
    return [_QUOTED_PATTERN.sub(r"\2", word) for word in arg_split(_strip_comment(line))]


def _strip_comment(line: str) -> str:
    """Return a line without a comment and a semicolon at its end.

    Example:
        >>> _strip_comment("cpu;  # the slow one"), _strip_comment("--model 'a #b'")
        ('cpu', "--model 'a #b'")
    """
    return _COMMENT_PATTERN.sub(r"\1", line).strip().removesuffix(";").strip()


def _usage_error(magic: Callable[..., object], message: str, remedy: str = "") -> MagicError:
    """Return the error for an invalid line, which refers to the help of the magic."""
    return MagicError(message, f"{remedy} See %{magic.__name__} --help.".lstrip())


SIMULATIONS = ("mps", "off")


@dataclass(frozen=True, repr=False)
class CheatSheet(Displayable):
    """The lines that a user can type, and the state of the session.

    Attributes:
        device: Active device with the reason, or the error, as a sentence.
        models: Names of the loaded models.
        devices: Devices of this computer.
    """

    device: str
    models: tuple[str, ...]
    devices: DeviceList

    def to_report(self) -> Report:
        """Return the state in two sentences, and the lines; those for MPS are collapsed without it."""
        models = ", ".join(self.models) if self.models else "none (a model is loaded on first use)"
        columns = ("command", "description")
        rows = tuple(row for row in CHEAT_SHEET_ROWS if row not in MPS_ROWS)
        tables = (
            Table("", columns, rows),
            Table("Commands for MPS", columns, MPS_ROWS, collapsed=not self.devices.has_mps),
            gpu_reasons_table(self.devices.unavailable),
        )
        return Report("openmed_nb", (self.device, f"Loaded models: {models}."), tables)


@magics_class
class OpenMedMagics(Magics):
    """The magics of openmed_nb. ``%config OpenMedMagics`` lists their settings."""

    default_model = Unicode("bundled", help="Default model for %%openmed_ner and %openmed_panel.").tag(config=True)
    aggregation_strategy = Enum(
        STRATEGIES,
        DEFAULT_STRATEGY,
        help="How to combine tokens (words and parts of words) into entities; see nb.load_pipeline.",
    ).tag(config=True)
    preload = Bool(
        True,
        help="Import torch and transformers in the background after the first %openmed, %openmed_device or %openmed_panel.",
    ).tag(config=True)
    show_text = Bool(
        True,
        help=(
            "Show the text of notes in the results of magics. Set it to False for real notes, because outputs are saved in the "
            "notebook. In Python, pass show_text=False."
        ),
    ).tag(config=True)
    context = Bool(
        True,
        help="Mark the context of entities in a displayed text, such as negated or family. It applies to nb.annotate too.",
    ).tag(config=True)

    @observe("context")
    def _set_context_marks(self, _change: object) -> None:
        SESSION.should_mark_context = self.context

    @cached_property
    def preloader(self) -> Preloader:
        """Import of torch and transformers in the background. Its code is imported on first use."""
        from .preload import Preloader

        return Preloader(self.shell, lambda: self.preload)

    @magic_arguments()
    @_parsed_line_magic
    def openmed(self, _arguments: argparse.Namespace) -> CheatSheet:
        """List the commands, and show the device and the loaded models."""
        self.preloader.schedule()
        choice = SESSION.choice_or_error(confirm=False)
        device = str(choice) if isinstance(choice, OpenMedError) else f"{choice.headline}."
        return CheatSheet(device, SESSION.inventory().names, SESSION.list_devices(confirm=False))

    @magic_arguments()
    @argument("device", nargs="?", help="auto, cpu, cuda, cuda:N, mps or gpu; if omitted, show the active device")
    @argument("--reset", action="store_true", help="undo your choice of device")
    @argument("--list", action="store_true", help="list all devices, and show which ones can be used")
    @argument(
        "--explain",
        action="store_true",
        help="show which setting chose the device, why other devices were not used, and the environment variables",
    )
    @argument("--simulate", metavar="DEVICE", help="mps simulates a Mac; off ends the simulation")
    @argument("--memory", metavar="SIZE", help='memory of the simulated Mac, such as "8 GiB"')
    @_json
    @_parsed_line_magic
    def openmed_device(self, arguments: argparse.Namespace) -> object:
        """Show or change the device that runs the models."""
        if arguments.memory is not None and arguments.simulate in (None, "off"):
            raise MagicError("%openmed_device --memory requires a simulated Mac.", "Add --simulate mps.")
        requests = {
            "--reset": arguments.reset,
            "--list": arguments.list,
            "--explain": arguments.explain,
            "--simulate": arguments.simulate is not None,
            "a device": arguments.device is not None,
        }
        requested = [name for name, is_requested in requests.items() if is_requested]
        if len(requested) > 1:
            listed = f"{', '.join(requested[:-1])} and {requested[-1]}"
            remedy = "Use only one of them." if arguments.memory is None else 'Enter a size as in --memory "8 GiB".'
            raise MagicError(f"%openmed_device: {listed} cannot be combined.", remedy)
        self.preloader.schedule()
        if arguments.device is not None:
            return SESSION.use(arguments.device, "%openmed_device")
        if arguments.simulate == "off":
            SESSION.end_simulation()
        elif arguments.simulate in SIMULATIONS:
            memory = DEFAULT_SIMULATED_MEMORY if arguments.memory is None else arguments.memory
            SESSION.simulate(memory, source="%openmed_device")
        elif arguments.simulate is not None:
            raise MagicError(
                f"{describe_value(arguments.simulate)} cannot be simulated.", "Use --simulate mps or --simulate off."
            )
        if arguments.reset:
            return SESSION.reset()
        if arguments.list:
            return SESSION.list_devices()
        return SESSION.explain() if arguments.explain else SESSION.device()

    @magic_arguments()
    @argument(
        "--model",
        help="short name (such as bundled_small), Hugging Face Hub id or folder "
        "(default: the setting OpenMedMagics.default_model, initially the bundled disease model)",
    )
    @argument(
        "--strategy",
        help="how to combine tokens (words and parts of words) into entities: none, simple, first, average or max; "
        "see nb.load_pipeline",
    )
    @argument("--device", help="device for this command only")
    @argument(
        "--from", dest="variable", metavar="NAME", help="variable with a text, a list of texts or a pandas Series"
    )
    @argument("--out", metavar="NAME", help="store the result in this variable instead of displaying it")
    @line_cell_magic
    @_parsed_magic
    def openmed_ner(self, arguments: argparse.Namespace, text: str, cell: str | None = None) -> object:
        """Find the entities in the rest of the line, in the text of the cell or in a variable, and highlight them."""
        texts = self._input_texts(arguments.variable, text, cell)
        out = arguments.out
        if out is not None and (not out.isidentifier() or iskeyword(out) or out in self.shell.user_ns_hidden):
            raise MagicError(f"{describe_value(out)} cannot be used as a variable name.", "Use a name such as 'found'.")
        model = self.default_model if arguments.model is None else arguments.model
        strategy = self.aggregation_strategy if arguments.strategy is None else arguments.strategy
        from .._annotate import annotate

        options = {"aggregation_strategy": strategy, "device": arguments.device}
        result = annotate(texts, model, show_text=self.show_text, **options)
        if out is None:
            return result
        self.shell.push({out: result})
        return None

    @magic_arguments()
    @argument("names", nargs="*", help="variables to delete")
    @argument("--keep-models", action="store_true", help="keep the loaded models")
    @argument("--keep-history", action="store_true", help="keep the output history (Out and _)")
    @argument("--keep-traceback", action="store_true", help="keep the last traceback for %%debug")
    @_parsed_line_magic
    def openmed_release(self, arguments: argparse.Namespace) -> object:
        """Release memory held by variables, the output history, the last error and loaded models."""
        from ..training.release import KEEPABLE, release

        return release(*arguments.names, keep=[source for source in KEEPABLE if getattr(arguments, f"keep_{source}")])

    @magic_arguments()
    @argument("--model", help="model for the text under 'Try it' (default: the setting default_model)")
    @argument("--close", action="store_true", help="close all open panels")
    @_parsed_line_magic
    def openmed_panel(self, arguments: argparse.Namespace) -> object:
        """Open an interactive panel: change the device, see the memory and the loaded models, and annotate a text."""
        from .panel import close_panels, panel

        if arguments.close:
            close_panels()
            return None
        self.preloader.schedule()
        return panel(self.default_model if arguments.model is None else arguments.model, self.show_text)

    @magic_arguments()
    @argument("model", nargs="?", help="model name, or a variable with a model (default: all loaded models)")
    @argument("--ops", metavar="MODEL", help="predict which operations of a model would run on the CPU instead of MPS")
    @_json
    @_parsed_line_magic
    def openmed_doctor(self, arguments: argparse.Namespace) -> object:
        """Check this computer, torch, the environment variables and the models for problems, and suggest fixes."""
        if arguments.ops is not None and arguments.model is not None:
            raise MagicError("%openmed_doctor accepts a model or --ops, not both.", "Use only one of them.")
        from ..runbook.checks.doctor import doctor
        from ..runbook.checks.forecast import forecast

        if arguments.ops is not None:
            return forecast(self._resolve_model(arguments.ops))
        return doctor(self._resolve_model(arguments.model))

    @magic_arguments()
    @argument("file", nargs="?", help="output file: .json, for a later --diff")
    @argument("--diff", metavar="FILE", help="show what has changed since this .json file was saved")
    @_json
    @_parsed_line_magic
    def openmed_log(self, arguments: argparse.Namespace) -> object:
        """Show or save a description of this computer (hardware, software versions, settings), or compare it with a saved one."""
        from ..runbook.records.gathering import logbook
        from ..runbook.records.logbook import Logbook

        if arguments.file is not None and check_path(arguments.file, "the file of a logbook").exists():
            raise MagicError(
                f"{describe_file(Path(arguments.file))} already exists and would be overwritten.",
                "Use another name. To compare with this file, use --diff.",
            )
        previous = None if arguments.diff is None else Logbook.read(arguments.diff)
        book = logbook()
        if arguments.file is not None:
            print(f"Saved to {book.save(arguments.file)}.")
        return book if previous is None else previous.diff(book)

    @magic_arguments()
    @argument("model", nargs="?", help="model name, or a variable with a pipeline (default: the bundled model)")
    @argument("--training", action="store_true", help="measure training steps instead of annotation")
    @argument("--length", type=int, metavar="N", help="number of tokens per text (default: 128)")
    @argument("--max-batch-size", type=int, metavar="N", help="largest batch size to measure")
    @argument("--seconds", type=float, metavar="N", help="approximate time limit in seconds (default: 30)")
    @argument("--device", help="device to use instead of the active one")
    @_json
    @_parsed_line_magic
    def openmed_sweep(self, arguments: argparse.Namespace) -> object:
        """Find the batch size above which the speed hardly increases, and measure the memory that each size needs."""
        from ..runbook.bench.sweep import sweep

        names = ("training", "device", "length", "max_batch_size", "seconds")
        options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
        return sweep(self._resolve_model(arguments.model), **options)

    @magic_arguments()
    @argument("folder", nargs="?", help="output folder (default: openmed_report)")
    @argument(
        "--quick", action="store_true", help="run fewer and shorter measurements: one to two minutes instead of five"
    )
    @argument("--training", action="store_true", help="measure training steps instead of annotation")
    @_json
    @_parsed_line_magic
    def openmed_report(self, arguments: argparse.Namespace) -> object:
        """Run measurements on this computer, each in a separate process, and write a report."""
        from ..runbook.records.report import DEFAULT_FOLDER, REVIEW_NOTICE, report

        folder = DEFAULT_FOLDER if arguments.folder is None else arguments.folder
        device_report = report(folder, quick=arguments.quick, training=arguments.training)
        print(REVIEW_NOTICE.format(folder=folder))
        return device_report

    def _input_texts(self, variable: str | None, text: str, cell: str | None) -> object:
        """Return the input of ``openmed_ner``: exactly one of the rest of the line, the cell and a variable."""
        name = "%openmed_ner" if cell is None else "%%openmed_ner"
        if variable is not None or cell is not None:
            text = _strip_comment(text)
        has_text = bool(text.strip() or (cell or "").strip())
        if variable is not None:
            if has_text:
                raise MagicError(f"{name} accepts either --from or a text, not both.", "Remove one of them.")
            if variable not in self.shell.user_ns:
                candidates = [candidate for candidate in self.shell.user_ns if not candidate.startswith("_")]
                remedy = suggest_one(variable, candidates) or "Use a variable that contains a text or a list of texts."
                raise MagicError(f"Undefined variable: {describe_value(variable)}.", remedy)
            return self.shell.user_ns[variable]
        if cell is not None and text:  # The words may be part of a note, so the error must not quote them.
            unexpected = pluralize(len(text.split()), "unexpected argument")
            raise MagicError(
                f"{name} received {unexpected} on its first line.",
                f"Write the text on the lines below the command. See {name} --help.",
            )
        if not has_text:
            remedy = "Write the text on the lines below the command, or use --from with a variable."
            if cell is None:
                remedy = (
                    "Write the text after the command, use --from with a variable, or write %%openmed_ner above a text."
                )
            raise MagicError(f"{name} has no text to annotate.", remedy)
        return text if cell is None else cell

    def _resolve_model(self, name: str | None) -> object:
        """Return the value of a variable with that name, or the name itself if the variable is a text or undefined.

        The text in a variable may be a note, which must not be used as the name of a model.
        """
        value = self.shell.user_ns.get(name, name)
        return name if isinstance(value, str) else value
