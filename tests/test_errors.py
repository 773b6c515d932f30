"""Exceptions: hierarchy, message and remedy in one line."""

import copy
import pickle
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb import errors
from openmed_nb._utils.text import collapse_whitespace, describe_error, shorten
from openmed_nb._utils.warning import warn
from openmed_nb.errors import OpenMedError


def drawn_tree():
    """Return the names and depths of the hierarchy in the docstring."""
    lines = re.findall(
        r"^((?:[├└│]?[─ ]* ?)*)(\w+)(?: {2,}.*)?$", (errors.__doc__ or "").split("\n\n")[1], re.MULTILINE
    )
    return [(len(indent) // 4, name) for indent, name in lines]


def real_tree(kind=OpenMedError, depth=0):
    """Return the names and depths of the actual hierarchy."""
    children = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [(depth, kind.__name__), *(row for child in children for row in real_tree(child, depth + 1))]


ALL = [getattr(errors, name) for _, name in real_tree()]


def test_hierarchy_matches_docstring():
    assert drawn_tree() == real_tree()


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
def test_warning_points_to_user_line(modules, expected):
    call = partial(warn, "It may break.")
    for name in modules:
        call = eval(compile("lambda: call()", name, "eval"), {"__name__": name, "call": call})  # noqa: S307

    with pytest.warns(errors.OpenMedWarning, match=r"^It may break\.$") as caught:
        call()

    assert [warning.filename for warning in caught] == [expected]


def test_error_has_message_and_remedy():
    for kind in ALL:
        error = kind("It broke\n  in two.", "Glue\tit.")

        assert (error.message, error.remedy) == ("It broke in two.", "Glue it.")
        assert str(error) == "It broke in two. Glue it."
        assert error._render_traceback_() == [f"{kind.__name__}: It broke in two. Glue it."]
        assert error.to_dict() == {"error": kind.__name__, "message": "It broke in two.", "remedy": "Glue it."}
        assert kind.__dict__["__doc__"], kind


def test_error_survives_copy_and_pickle():
    for kind in ALL:
        error = kind("It broke.", "Glue it.")
        for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301
            assert type(again) is kind
            assert again.to_dict() == {"error": kind.__name__, "message": "It broke.", "remedy": "Glue it."}


def test_error_is_caught_as_builtin():
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
    (line,) = OpenMedError(what, remedy)._render_traceback_()

    assert len(line.splitlines()) == 1
    assert len(collapse_whitespace(what).splitlines()) <= 1


@given(st.text(max_size=200), st.integers(1, 100))
def test_shorten_limits_length(text, length):
    short = shorten(text, length)

    assert len(short) <= length + 1
    assert short == collapse_whitespace(text) or short.endswith("…")


def test_describe_error_hides_quoted_bytes():
    assert describe_error(ValueError("cannot read b'Has asthma now.' here")) == "cannot read '…' here"


def test_describe_error_without_period():
    assert describe_error(ValueError("no such file.")) == "no such file"
    assert describe_error(MemoryError()) == "MemoryError"
