"""The magics: parse the line, call one verb of the session, return a value that shows itself; every mistake is our error.

Every magic returns a value: ``choice = %openmed_device cpu``. ``--help`` describes each, and ``%openmed`` lists them.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from keyword import iskeyword
from pathlib import Path
from typing import Any

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
from traitlets import Bool, Enum, Unicode

from .._render.display import Displayable, Json, Report, Table
from .._utils.text import describe_file, describe_value, parser_problem, short_type_name
from .._utils.validation import check_path, closest_match
from ..devices.machine import DEFAULT_SIMULATED_MEMORY, is_mps_simulated
from ..errors import MagicError, OpenMedError
from ..models.config import DEFAULT_STRATEGY, STRATEGIES
from ..session import SESSION

# What a person types first, and what it does: the cheat sheet, and the examples of ``--help``.
CHEAT_SHEET_ROWS = (
    ("%openmed_device", "which device this session uses, and why"),
    ("%openmed_device cpu", "another device for this session; auto, mps, cuda, cuda:1"),
    ("%openmed_device --list", "every device, with why it can or cannot be used"),
    ("%openmed_device --explain", "who asked for what, and what became of the environment"),
    ('%openmed_device --simulate mps --memory "8 GiB"', "a simulated Mac, until --simulate off"),
    ("%openmed_panel", "all of this to look at and to click"),
    ("%openmed_ner Patient has asthma", "mark the entities of a line"),
    ("%%openmed_ner", "mark the entities of the text in the lines below"),
    ("%openmed_ner --from notes", "of a variable: a text, a list of texts, a Series"),
    ("%openmed_ner --out found {note}", "of the text in a variable, into another one"),
    ("%openmed_doctor", "what is wrong here, and what to do"),
    ("%openmed_doctor --ops bundled", "which operators of a model would leave MPS for the CPU"),
    ("%openmed_sweep bundled --seconds 10", "the best batch size"),
    ("%openmed_log run.json", "write down what figures are measured with"),
    ("%openmed_log --diff run.json", "what is different now"),
    ("%openmed_release", "hand memory back; with names, those variables too"),
    ("%openmed_report --quick", "measure this computer from end to end"),
    ("found = nb.annotate(notes)", "many texts, with a bar; nb is openmed_nb"),
    ("found.show(17)", "one of them, with its entities marked"),
    ('found.only("disease", score=0.9)', "some of the entities alone"),
    ("nb.compare()", "how much faster than the CPU, and where the time goes"),
)

# A word of a line, or several in quotes.
_WORD = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[^\s"'])+)""")

_QUOTED_PATTERN = re.compile(r"([\"'])(.*?)\1", flags=re.DOTALL)

# A comment, and what no comment begins in: quotes, also those that are not closed.
_COMMENT = re.compile(r"""("[^"]*(?:"|$)|'[^']*(?:'|$))|(?:^|(?<=[\s;]))#.*""", flags=re.DOTALL)

_json = argument("--json", action="store_true", help="return the answer as JSON")


def _parsed_magic(verb: Callable[..., Any]) -> Any:
    """Return a magic that parses its line for a verb; ``--help`` prints the usage, ``--json`` makes JSON of the answer.

    For a verb with ``text``, what stands behind the options is a text, and is left as it is.
    """
    takes_text = "text" in inspect.signature(verb).parameters

    @argument("-h", "--help", action="store_true", help="print this help")
    @no_var_expand  # IPython leaves a name that is not defined as it stands; see _expanded().
    @needs_local_scope
    @wraps(verb)
    def magic(self: Magics, line: str, *cell: str, local_ns: Mapping[str, Any] | None = None) -> Any:
        line = _expanded(line, {**self.shell.user_ns, **(local_ns or {})})
        options, text = split_options(magic.parser, line) if takes_text else (line, "")
        arguments = parse_line(magic, options)
        if arguments.help:
            print((magic.__doc__ or "").removeprefix("::").strip())
            rows = [row for row in CHEAT_SHEET_ROWS if row[0].split()[0].lstrip("%") == magic.__name__]
            if rows:
                print("\nexamples:")
            width = max((len(typed) for typed, _ in rows), default=0)
            for typed, does in rows:
                print(f"  {typed:{width}}  {does}")
            return None
        answer = verb(self, arguments, text, *cell) if takes_text else verb(self, arguments, *cell)
        return Json.of(answer.to_dict()) if getattr(arguments, "json", False) else answer

    return magic


def _parsed_line_magic(verb: Callable[..., Any]) -> Any:
    """Return a line magic for a verb; a semicolon at the end of its line keeps the answer from being shown."""
    return output_can_be_silenced(line_magic(_parsed_magic(verb)))


def _expanded(line: str, namespace: dict[str, Any]) -> str:
    """Return a line in which variables stand for ``{name}`` and ``$name``, as IPython has it.

    An expression in braces that fails is an error, because the braces themselves would be read as a note. Braces that hold
    no Python, and a dollar sign before a name that is not defined, stay as they are.

    Example:
        >>> _expanded("--model {name} {{x}} {type 2 diabetes} $cost", {"name": "bundled"})
        '--model {name} {{x}} {type 2 diabetes} $cost'
        >>> _expanded("{name} since {year + 1}, $cost", {"name": "Asthma", "year": 2019})
        'Asthma since 2020, $cost'
        >>> _expanded("{nmae}", {"name": "Asthma"})
        Traceback (most recent call last):
        ...
        openmed_nb.errors.MagicError: No variable is called 'nmae'. Define it first, or write {{ and }} for braces in a text.
    """
    formatter = DollarFormatter()
    braces = "or write {{ and }} for braces in a text."
    try:
        for _, field, rest, _ in formatter.parse(line):
            if field is not None:
                compile(f"{field}:{rest}".removesuffix(":").strip(), "", "eval")
    except (SyntaxError, ValueError):
        return line
    for name in re.findall(r"\$([^\W\d]\w*)", line):
        if not re.search(rf"{{[^{{}}]*\b{name}\b", line):
            namespace.setdefault(name, f"${name}")
    try:
        return str(formatter.vformat(line, args=[], kwargs=namespace))
    except Exception as error:  # noqa: BLE001 - of whatever code stands between the braces
        name = getattr(error, "name", None)
        if isinstance(error, NameError) and name and name not in namespace and re.search(rf"\b{name}\b", line):
            what = f"No variable is called {describe_value(name)}."
            raise MagicError(what, f"Define it first, {braces}") from None
        what = f"An expression in braces fails with {short_type_name(error)}."
        raise MagicError(what, f"Mend it, {braces}") from None


def split_options(parser: argparse.ArgumentParser, line: str) -> tuple[str, str]:
    """Return the options at the start of a line, and the text after them, unchanged.

    The text starts at the first word without a dash, at a dash alone, or after ``--``.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> _ = parser.add_argument("--model")
        >>> split(parser, "--model 'my model' The patient's asthma; # 2")
        ("--model 'my model'", "The patient's asthma; # 2")
        >>> split(parser, "-- -HIV positive"), split(parser, "- asthma")
        (('', '-HIV positive'), ('', '- asthma'))
    """
    options = parser._option_string_actions  # noqa: SLF001 - argparse has no name
    place = 0
    while (word := _WORD.match(line, place)) and word[1].startswith("-") and word[1] != "-":
        if word[1] == "--":
            return line[:place], line[word.end() :].strip()
        place = word.end()
        takes_value = word[1] in options and options[word[1]].nargs != 0
        if takes_value and (value := _WORD.match(line, place)):
            place = value.end()
    return line[:place], line[place:].strip()


def parse_line(magic: Callable[..., Any], line: str) -> argparse.Namespace:
    """Return the arguments of a magic; a comment and a semicolon at the end are left out, as Python would leave them out."""
    parser: argparse.ArgumentParser = magic.parser  # type: ignore[attr-defined]  # set by magic_arguments
    options = parser._option_string_actions  # noqa: SLF001 - argparse has no name
    try:
        arguments, others = parser.parse_known_args(split_words(line))
    except (UsageError, ValueError) as error:
        raise _usage_error(magic, f"cannot read its line: {parser_problem(str(error))}") from None
    # What argparse makes of "--option=--": an empty list, and from Python 3.13 on the two dashes.
    if any(getattr(arguments, option.dest) in ([], "--") for option in options.values()):
        raise _usage_error(magic, "got an option without its value")
    if flags := [word for word in others if word.startswith("-")]:
        meant = closest_match(flags[0], options, cutoff=0.6)
        remedy = f"Use {meant}" if meant else ""
        if not meant and magic.__name__ == "openmed_ner":  # The word itself may be part of a note, such as "-HIV".
            remedy = "Write -- before a text that starts with a dash"
        raise _usage_error(magic, "does not have this option", remedy)
    if others:  # They may be part of a note, so they are only counted.
        raise _usage_error(magic, f"got {len(others)} words too many")
    return arguments


def split_words(line: str) -> list[str]:
    r"""Return the words of a line, without the quotes that hold a word with spaces together.

    A backslash is kept, because Windows writes paths with it.

    Example:
        >>> words("--model 'my models/mine' --device=\"cpu\" ; # the slow one")
        ['--model', 'my models/mine', '--device=cpu']
    """
    return [_QUOTED_PATTERN.sub(r"\2", word) for word in arg_split(_clean(line))]


def _clean(line: str) -> str:
    """Return the line without a comment and a semicolon at its end.

    Example:
        >>> _clean("cpu;  # the slow one"), _clean("--model 'a #b'")
        ('cpu', "--model 'a #b'")
    """
    return _COMMENT.sub(r"\1", line).strip().removesuffix(";").strip()


def _usage_error(magic: Callable[..., Any], what: str, remedy: str = "") -> MagicError:
    name = f"%{magic.__name__}"
    return MagicError(f"{name} {what}.", f"{remedy}, or see {name} --help." if remedy else f"See {name} --help.")


SIMULATIONS = ("mps", "off")


@dataclass(frozen=True, repr=False)
class CheatSheet(Displayable):
    """What can be typed, and the state of a session.

    Attributes:
        device: The device in force, and why, as a sentence, or why there is none.
        models: The names of the models in memory.
        simulated: Whether the session runs on a simulated Mac.
    """

    device: str
    models: tuple[str, ...]
    simulated: bool = False

    def to_report(self) -> Report:
        """Return the state in two sentences, and a table of what can be typed."""
        models = ", ".join(self.models) if self.models else "none yet; the first use loads one"
        sentences = (self.device, f"Models in memory: {models}.")
        return Report("openmed_nb", sentences, (Table("", ("type", "to see or do"), CHEAT_SHEET_ROWS),))


@magics_class
class OpenMedMagics(Magics):
    """The magics of openmed_nb; ``%config OpenMedMagics`` lists these settings."""

    default_model = Unicode("bundled", help="The model of %%openmed_ner where --model does not name one.").tag(
        config=True
    )
    aggregation_strategy = Enum(
        STRATEGIES, DEFAULT_STRATEGY, help="How tokens become entities where --strategy does not say."
    ).tag(config=True)
    show_text = Bool(True, help="Whether results show the note's text; outputs are saved in the notebook.").tag(
        config=True
    )

    @magic_arguments()
    @_parsed_line_magic
    def openmed(self, _arguments: argparse.Namespace) -> CheatSheet:
        """Show what can be typed, and the state of this session."""
        choice = SESSION.choice_or_error(confirm=False)
        device = str(choice) if isinstance(choice, OpenMedError) else f"{choice.headline}."
        return CheatSheet(device, SESSION.inventory().names, is_mps_simulated())

    @magic_arguments()
    @argument("device", nargs="?", help="auto, cpu, cuda, cuda:N, mps or gpu; nothing shows the device in force")
    @argument("--reset", action="store_true", help="drop the override; the shell and the machine decide again")
    @argument("--list", action="store_true", help="list every device, with why it can or cannot be used")
    @argument("--explain", action="store_true", help="show who asked, what was ruled out, and the environment")
    @argument("--simulate", metavar="DEVICE", help="mps runs the session on a simulated Mac, off comes back")
    @argument("--memory", metavar="SIZE", help='the RAM of the simulated Mac, such as "8 GiB"')
    @_json
    @_parsed_line_magic
    def openmed_device(self, arguments: argparse.Namespace) -> Any:
        """Show the device of this session and why, or change it."""
        if arguments.memory is not None and arguments.simulate in (None, "off"):
            raise MagicError("%openmed_device --memory is for a simulated Mac.", "Write --simulate mps before it.")
        wishes = {
            "--reset": arguments.reset,
            "--list": arguments.list,
            "--explain": arguments.explain,
            "--simulate": arguments.simulate is not None,
            "a device": arguments.device is not None,
        }
        asked = [name for name, wished in wishes.items() if wished]
        if len(asked) > 1:
            raise MagicError(f"%openmed_device cannot do {' and '.join(asked)} at once.", "Ask for one of them.")
        if arguments.device is not None:
            return SESSION.use(arguments.device, "%openmed_device")
        if arguments.simulate == "off":
            SESSION.end_simulation()
        elif arguments.simulate in SIMULATIONS:
            memory = DEFAULT_SIMULATED_MEMORY if arguments.memory is None else arguments.memory
            SESSION.simulate(memory, source="%openmed_device")
        elif arguments.simulate is not None:
            what = f"{describe_value(arguments.simulate)} cannot be simulated."
            raise MagicError(what, "Write --simulate mps, or --simulate off.")
        if arguments.reset:
            return SESSION.reset()
        if arguments.list:
            return SESSION.list_devices()
        return SESSION.explain() if arguments.explain else SESSION.device()

    @magic_arguments()
    @argument("--model", help="an alias, a hub id or a folder; the bundled disease model where it is left out")
    @argument("--strategy", help="how tokens become entities: none, simple, first, average or max")
    @argument("--device", help="a device for this cell only")
    @argument("--from", dest="variable", metavar="NAME", help="a variable with a text, or with many: a list, a Series")
    @argument("--out", metavar="NAME", help="put the result into a variable instead of showing it")
    @line_cell_magic
    @_parsed_magic
    def openmed_ner(self, arguments: argparse.Namespace, text: str, cell: str | None = None) -> Any:
        """Find entities in the rest of the line, in the text of the cell or in a variable, and show them in it."""
        texts = self._input_texts(arguments.variable, text, cell)
        out = arguments.out
        if out is not None and (not out.isidentifier() or iskeyword(out) or out in self.shell.user_ns_hidden):
            raise MagicError(f"{describe_value(out)} is not a valid variable name.", "Use a name such as 'found'.")
        model = self.default_model if arguments.model is None else arguments.model
        strategy = self.aggregation_strategy if arguments.strategy is None else arguments.strategy
        from .._annotate import annotate, annotate_text

        if isinstance(texts, str):
            result: Any = annotate_text(SESSION, texts, model, arguments.device, strategy, self.show_text)
        else:
            options = {"aggregation_strategy": strategy, "device": arguments.device}
            result = annotate(texts, model, show_text=self.show_text, **options)
        if out is None:
            return result
        self.shell.push({out: result})
        return None

    @magic_arguments()
    @argument("names", nargs="*", help="variables to delete")
    @argument("--keep-models", action="store_true", help="keep the models that were loaded")
    @argument("--keep-history", action="store_true", help="keep Out and _, which hold what cells have shown")
    @argument("--keep-traceback", action="store_true", help="keep the frames of the last error, for %%debug")
    @_parsed_line_magic
    def openmed_release(self, arguments: argparse.Namespace) -> Any:
        """Hand back the memory that variables, the history of outputs, the last error and loaded models keep."""
        from ..training.release import release

        return release(
            *arguments.names,
            namespace=self.shell.user_ns,
            models=not arguments.keep_models,
            history=not arguments.keep_history,
            traceback=not arguments.keep_traceback,
        )

    @magic_arguments()
    @argument("--model", help="the model of the text to try; the default of %%%%openmed_ner where it is left out")
    @argument("--close", action="store_true", help="close every open panel")
    @_parsed_line_magic
    def openmed_panel(self, arguments: argparse.Namespace) -> Any:
        """Open a panel: device, environment, memory, models and a text to try, to look at and to click."""
        from .panel import close_panels, panel

        if arguments.close:
            close_panels()
            return None
        return panel(self.default_model if arguments.model is None else arguments.model, self.show_text)

    @magic_arguments()
    @argument("model", nargs="?", help="a model to look at, by name or variable; those that are loaded if left out")
    @argument("--ops", metavar="MODEL", help="forecast which operators of a model would leave MPS for the CPU")
    @_json
    @_parsed_line_magic
    def openmed_doctor(self, arguments: argparse.Namespace) -> Any:
        """Look at this computer, torch, the environment and the models, and say what is wrong and what to do."""
        if arguments.ops is not None and arguments.model is not None:
            raise MagicError("%openmed_doctor cannot look at one model and forecast another.", "Ask for one of them.")
        from ..runbook.checks.doctor.report import doctor
        from ..runbook.checks.operators.forecast import forecast

        if arguments.ops is not None:
            return forecast(self._resolve_model(arguments.ops), training=True)
        return doctor(self._resolve_model(arguments.model))

    @magic_arguments()
    @argument("file", nargs="?", help="write it into this file: .json to be read again, .md for people")
    @argument("--diff", metavar="FILE", help="compare a logbook of this .json file with the one of now")
    @_json
    @_parsed_line_magic
    def openmed_log(self, arguments: argparse.Namespace) -> Any:
        """Write down what figures are measured with here and now, or compare that with a logbook."""
        from ..runbook.records.logbook.gathering import logbook
        from ..runbook.records.logbook.logbook import Logbook

        if arguments.file is not None and check_path(arguments.file, "the file of a logbook").exists():
            what = f"{describe_file(Path(arguments.file))} is there already, and its figures would be gone."
            raise MagicError(what, "Write another name, or --diff before it to compare.")
        former = None if arguments.diff is None else Logbook.read(arguments.diff)
        book = logbook()
        if arguments.file is not None:
            print(f"Written to {book.save(arguments.file)}.")
        return book if former is None else former.diff(book)

    @magic_arguments()
    @argument("model", nargs="?", help="a model by name, or a variable with a pipeline; the bundled one if left out")
    @argument("--training", action="store_true", help="measure training steps instead of annotating")
    @argument("--length", type=int, metavar="N", help="how many tokens a row has; 128 if left out")
    @argument("--largest", type=int, metavar="N", help="the most rows that are tried")
    @argument("--seconds", type=float, metavar="N", help="about how long it may take; 30 if left out")
    @argument("--device", help="another device than the one in force")
    @_json
    @_parsed_line_magic
    def openmed_sweep(self, arguments: argparse.Namespace) -> Any:
        """Find the batch size from which larger batches no longer pay, with what each takes of the memory."""
        from ..runbook.bench.sweep import sweep

        wanted = ("training", "device", "length", "largest", "seconds")
        said = {name: value for name in wanted if (value := getattr(arguments, name)) is not None}
        return sweep(self._resolve_model(arguments.model), **said)

    @magic_arguments()
    @argument("folder", nargs="?", help="where report.html, report.json and issue.md go; openmed_report if left out")
    @argument("--quick", action="store_true", help="fewer and shorter measurements: about one minute instead of five")
    @argument("--training", action="store_true", help="measure training steps instead of annotating")
    @_json
    @_parsed_line_magic
    def openmed_report(self, arguments: argparse.Namespace) -> Any:
        """Measure this computer from end to end, each step in a process of its own, and write what was found."""
        from ..runbook.records.report.report import FOLDER, REVIEW_NOTICE, report

        folder = FOLDER if arguments.folder is None else arguments.folder
        found = report(folder, quick=arguments.quick, training=arguments.training)
        print(REVIEW_NOTICE.format(folder=folder))
        return found

    def _input_texts(self, variable: str | None, text: str, cell: str | None) -> Any:
        """Return what a magic shall read: the rest of its line, its cell or a variable, but only one of them."""
        name = "%openmed_ner" if cell is None else "%%openmed_ner"
        if variable is not None or cell is not None:
            text = _clean(text)
        given = [one for one in (text, cell or "") if one.strip()]
        if variable is not None:
            if given:
                raise MagicError(f"{name} --from reads a variable, and there is a text too.", "Leave one of them out.")
            if variable not in self.shell.user_ns:
                meant = closest_match(variable, [one for one in self.shell.user_ns if not one.startswith("_")])
                remedy = f"Did you mean {meant}?" if meant else "Name a variable that holds a text, or many."
                raise MagicError(f"No variable is called {describe_value(variable)}.", remedy)
            return self.shell.user_ns[variable]
        if cell is not None and text:  # It may be part of a note, so its words are only counted.
            what = f"{name} got {len(text.split())} words too many in its first line."
            raise MagicError(what, f"Write the text in the lines below it, or see {name} --help.")
        if not given:
            place = "behind it" if cell is None else "in the lines below it"
            more = "; %%openmed_ner reads the lines of its cell" if cell is None else ""
            raise MagicError(f"{name} has no text.", f"Write the text {place}, or --from and a variable{more}.")
        return text if cell is None else cell

    def _resolve_model(self, name: str | None) -> Any:
        """Return the model that a variable of that name holds, or the name itself; a text in a variable may be a note."""
        value = self.shell.user_ns.get(name, name)
        return name if isinstance(value, str) else value
