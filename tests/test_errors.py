"""The errors: a tree as drawn, each with what happened and a remedy, in one line."""

import copy
import pickle
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb import errors
from openmed_nb._utils.text import collapse_whitespace, describe_error, describe_value, shorten
from openmed_nb._utils.validation import check_bool, check_integer
from openmed_nb._utils.warning import warn
from openmed_nb.errors import ConfigurationError, OpenMedError


def family(kind):
    """Return an error class and all below it, in the order of the file."""
    return [
        kind,
        *(one for child in kind.__subclasses__() if child.__module__ == errors.__name__ for one in family(child)),
    ]


ALL = family(OpenMedError)


def drawn_tree():
    """Return the names of the tree in the docstring, each with its depth."""
    lines = re.findall(
        r"^((?:[├└│]?[─ ]* ?)*)(\w+)(?: {2,}.*)?$", (errors.__doc__ or "").split("\n\n")[1], re.MULTILINE
    )
    return [(len(indent) // 4, name) for indent, name in lines]


def real_tree(kind=OpenMedError, depth=0):
    """Return the names of the real tree, each with its depth."""
    children = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [(depth, kind.__name__), *(row for child in children for row in real_tree(child, depth + 1))]


def test_tree_is_as_drawn():
    """The tree in the docstring is the real one, name by name and level by level."""
    assert drawn_tree() == real_tree()


def test_every_error_of_the_file_is_in_the_tree():
    """The file defines no error outside of its tree, but for the one that is no Exception and the warning."""
    defined = {one for one in vars(errors).values() if isinstance(one, type) and one.__module__ == errors.__name__}

    assert defined - {errors.RunInterrupted, errors.OpenMedWarning} == set(ALL)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ((), __file__),
        (("openmed_nb.models.loading",), __file__),
        (("openmed_nb.training.epochs", "transformers.trainer", "torch", "contextlib", "IPython.core.magic"), __file__),
        (("openmed_nb", "torchvision.models"), "torchvision.models"),
        (("openmed_nb_of_mine",), "openmed_nb_of_mine"),
    ],
)
def test_warning_points_at_a_line_of_the_person(modules, expected):
    """A warning points at the first line up that is neither ours nor of a library that calls ours."""
    call = partial(warn, "It may break.")
    for name in modules:
        call = eval(compile("lambda: call()", name, "eval"), {"__name__": name, "call": call})  # noqa: S307

    with pytest.warns(errors.OpenMedWarning, match=r"^It may break\.$") as caught:
        call()

    assert [one.filename for one in caught] == [expected]


def test_error_says_what_and_remedy():
    """An error carries what happened and the remedy, prints both in one line, and is described by its class."""
    for kind in ALL:
        error = kind("It broke\n  in two.", "Glue\tit.")

        assert (error.message, error.remedy) == ("It broke in two.", "Glue it.")
        assert str(error) == "It broke in two. Glue it."
        assert error._render_traceback_() == [f"{kind.__name__}: It broke in two. Glue it."]
        assert error.to_dict() == {"error": kind.__name__, "message": "It broke in two.", "remedy": "Glue it."}
        assert kind.__dict__["__doc__"], kind


def test_error_survives_copying():
    """An error comes out of a copy or a pickle, as from a worker process, as it went in."""
    for kind in ALL:
        error = kind("It broke.", "Glue it.")
        for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301
            assert type(again) is kind
            assert again.to_dict() == {"error": kind.__name__, "message": "It broke.", "remedy": "Glue it."}


def test_error_is_caught_as_its_builtin_kind():
    """Code that knows nothing of this package catches an error under Python's own name for its kind."""
    kinds = {
        "ConfigurationError": ValueError,
        "UnknownDeviceError": ValueError,
        "DeviceUnavailableError": RuntimeError,
        "TorchImportError": ImportError,
        "UnknownModelError": LookupError,
        "ModelDownloadError": OSError,
        "UntrustedModelError": PermissionError,
        "InvalidModelError": RuntimeError,
        "InvalidBatchError": ValueError,
        "NonFiniteError": FloatingPointError,
        "MagicError": ValueError,
    }
    for name, builtin in kinds.items():
        with pytest.raises(builtin, match=r"^It broke\. Glue it\.$"):
            raise getattr(errors, name)("It broke.", "Glue it.")


@given(st.text(max_size=200), st.text(max_size=200))
def test_error_is_always_one_line(what, remedy):
    """Whatever a message holds, an error is rendered as a single line."""
    (line,) = OpenMedError(what, remedy)._render_traceback_()

    assert len(line.splitlines()) == 1
    assert len(collapse_whitespace(what).splitlines()) <= 1


@given(st.text(max_size=200), st.integers(1, 100))
def test_shortened_text(text, length):
    """A shortened text has at most so many characters, and a mark where something was cut off."""
    short = shorten(text, length)

    assert len(short) <= length + 1
    assert short == collapse_whitespace(text) or short.endswith("…")


@pytest.mark.parametrize("value", ["no", 1, None, [], float("nan")])
def test_a_flag_is_true_or_false(value):
    """What is neither True nor False is refused as a flag, with the value."""
    with pytest.raises(
        ConfigurationError, match=rf"Invalid value for training: {re.escape(describe_value(value))}\. Pass True or False\."
    ):
        check_bool("training", value)


@pytest.mark.parametrize("value", [True, 3.0, "3", None])
def test_a_whole_number_is_no_other_type(value):
    """What is equal to a whole number, or reads like one, is refused all the same."""
    assert check_integer("batch_size", 3) == 3
    with pytest.raises(ConfigurationError, match="Pass an integer from 1"):
        check_integer("batch_size", value)


def test_cause_hides_quoted_bytes_that_may_be_a_note():
    assert describe_error(ValueError("cannot read b'Has asthma now.' here")) == "cannot read '…' here"


def test_the_cause_of_another_error():
    """What an error of someone else says stands in ours without its full stop, or else the name of its class."""
    assert describe_error(ValueError("no such file.")) == "no such file"
    assert describe_error(MemoryError()) == "MemoryError"
