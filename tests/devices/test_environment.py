"""Plan of the MPS variables: values, effects, notes and remedies."""

import ctypes
import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openmed_nb.devices.environment import (
    CONFLICT,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    LOW_WATERMARK_VARIABLE,
    NOT_FOR_DEVICE,
    PENDING,
    RESTART_REMEDY,
    TOO_LATE,
    UNKNOWN,
    UNSET_BOTH_REMEDY,
    VARIABLES,
    TorchState,
    parse_ratio,
    plan_mps_variables,
)

strtod = ctypes.CDLL(None).strtod
strtod.restype, strtod.argtypes = ctypes.c_double, (ctypes.c_char_p, ctypes.c_void_p)

RATIOS = "-0.1 0.0 0.1 0.3 0.5 0.7 0.8 0.89 0.9 1.0 1.2 1.4 1.5 1.7 1.8 2.0 2.1 nan"
GRID = (None, *RATIOS.split())
PAIRS = list(itertools.product(GRID, GRID))

NUMBERS = st.floats(-0.5, 2.5).map(str) | st.sampled_from(("inf", "-infinity", "NaN", "", "1e-400", "1e400", "5e-324"))
WRITTEN = NUMBERS | st.text("0123456789.,+-eEinfatyINFATY_ \t", max_size=7)
UNSET_OR_WRITTEN = st.none() | WRITTEN


def torch_refuses(environ):
    """Return the error of torch for the watermarks of an environment, as in MPSAllocator.mm:86 and :100."""
    high = strtod(environ.get(HIGH_WATERMARK_VARIABLE, "1.7").encode(), None)
    low = strtod(environ.get(LOW_WATERMARK_VARIABLE, "1.4").encode(), None)
    if not 0 <= high <= 2.0:
        return f"invalid high watermark ratio {high:g}"
    if not 0 <= low <= (2.0 if high == 0 else high):
        return f"invalid low watermark ratio {low:g}"
    return ""


def shell(high, low):
    """Return an environment with watermarks of the user."""
    return {
        name: value
        for name, value in ((HIGH_WATERMARK_VARIABLE, high), (LOW_WATERMARK_VARIABLE, low))
        if value is not None
    }


def with_plan(user_environ):
    """Return the environment of the user after the plan for MPS is applied."""
    return {**user_environ, **plan_mps_variables(user_environ).variables_to_set}


def settings_of(user_environ, moment=None, device="mps"):
    """Return the settings of a plan by name."""
    return {setting.name: setting for setting in plan_mps_variables(user_environ, device, moment).settings}


def check_pair(high, low):
    """Assert that the plan for a pair of ratios satisfies the checks of torch."""
    user_environ = shell(high, low)
    environ = with_plan(user_environ)
    planned = settings_of(user_environ)

    assert {name: environ[name] for name in user_environ} == user_environ
    assert not torch_refuses(environ) or torch_refuses(user_environ), user_environ
    for name in (HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE):
        assert (planned[name].effect == CONFLICT) is bool(torch_refuses(environ)), user_environ
        assert torch_refuses(environ) in planned[name].note, user_environ


def test_plan_watermarks_on_grid():
    for high, low in PAIRS:
        check_pair(high, low)


@given(UNSET_OR_WRITTEN, UNSET_OR_WRITTEN)
@example("0.7x", None)
@example(None, "1,2")
@example("5e-324", None)
def test_plan_watermarks_for_any_text(high, low):
    check_pair(high, low)


@given(WRITTEN.filter(lambda text: 0 <= strtod(text.encode(), None) <= 2.0))
def test_plan_fixes_high_watermark_without_low(high):
    assert torch_refuses(with_plan(shell(high, None))) == ""


@given(WRITTEN)
def test_parse_ratio_matches_strtod(text):
    assert repr(abs(parse_ratio(text))) == repr(abs(strtod(text.encode(), None)))


FALLBACK = {FALLBACK_VARIABLE: "1"}
DEFAULTS = shell("1.0", "0.9")


@pytest.mark.parametrize(
    ("user_environ", "added"),
    [
        ({}, FALLBACK | DEFAULTS),
        ({FALLBACK_VARIABLE: "0"}, DEFAULTS),
        ({FALLBACK_VARIABLE: ""}, DEFAULTS),
        (shell("0.7", None), FALLBACK | shell(None, "0.63")),
        *((shell(high, None), FALLBACK | shell(None, "0.9")) for high in ("0.0", "1.0", "2.0")),
        *((shell(None, low), FALLBACK | shell(high, None)) for low, high in (("0.5", "1.0"), ("1.2", "1.2"))),
        *((shell(high, None), FALLBACK) for high in ("2.5", "nan")),
        *((shell(None, low), FALLBACK) for low in ("2.5", "-1")),
        *((shell(high, low), FALLBACK) for high, low in (("0.7", "1.4"), ("1.5", "0.5"))),
        (FALLBACK | DEFAULTS, {}),
    ],
    ids=str,
)
def test_plan_adds_unset_variables(user_environ, added):
    assert plan_mps_variables(user_environ).variables_to_set == added


@pytest.mark.parametrize(
    ("name", "value", "note", "remedy"),
    [
        (HIGH_WATERMARK_VARIABLE, "0,9", "'0,9' is not a number; torch parses it as 0", "from 0 to 2"),
        (HIGH_WATERMARK_VARIABLE, "many", "torch parses it as 0", "from 0 to 2"),
        (LOW_WATERMARK_VARIABLE, "0.5x", "torch parses it as 0.5", "from 0 to 2"),
        (LOW_WATERMARK_VARIABLE, "", "'' is not a number", "from 0 to 2"),
        (HIGH_WATERMARK_VARIABLE, "0", "no limit", ""),
        *((name, "0.7", "", "") for name in (HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE)),
        (LOW_WATERMARK_VARIABLE, "0", "", ""),
        (HIGH_WATERMARK_VARIABLE, "nan", "invalid high watermark ratio nan", UNSET_BOTH_REMEDY),
        (HIGH_WATERMARK_VARIABLE, "2.5", "invalid high watermark ratio 2.5", UNSET_BOTH_REMEDY),
        (LOW_WATERMARK_VARIABLE, "-1", "invalid low watermark ratio -1", UNSET_BOTH_REMEDY),
        (FALLBACK_VARIABLE, "false", "torch treats 'false' as enabled", "to 0 or 1"),
        (FALLBACK_VARIABLE, "", "torch treats '' as enabled", "to 0 or 1"),
        (FALLBACK_VARIABLE, "0", "", ""),
    ],
)
def test_plan_explains_values(name, value, note, remedy):
    setting = settings_of({name: value})[name]
    assert setting.value == value
    assert note in setting.note
    assert remedy in setting.remedy
    assert (bool(setting.note), bool(setting.remedy)) == (bool(note), bool(remedy))


BEFORE = TorchState()
UNTOUCHED = TorchState(torch_loaded=True, allocator_started=False)
ALLOCATOR_UNKNOWN = TorchState(torch_loaded=True, allocator_started=None)
IN_USE = TorchState(torch_loaded=True, allocator_started=True)


@pytest.mark.parametrize(
    ("name", "value", "effects"),
    [
        (FALLBACK_VARIABLE, None, (PENDING, TOO_LATE, TOO_LATE, TOO_LATE)),
        (FALLBACK_VARIABLE, "1", (PENDING, UNKNOWN, UNKNOWN, UNKNOWN)),
        (HIGH_WATERMARK_VARIABLE, None, (PENDING, PENDING, UNKNOWN, TOO_LATE)),
        (HIGH_WATERMARK_VARIABLE, "0.7", (PENDING, PENDING, UNKNOWN, UNKNOWN)),
        (LOW_WATERMARK_VARIABLE, None, (PENDING, PENDING, UNKNOWN, TOO_LATE)),
        (HIGH_WATERMARK_VARIABLE, "2.5", (CONFLICT, CONFLICT, CONFLICT, CONFLICT)),
    ],
)
def test_effect_without_observations(name, value, effects):
    user_environ = {} if value is None else {name: value}
    moments = (BEFORE, UNTOUCHED, ALLOCATOR_UNKNOWN, IN_USE)
    assert tuple(settings_of(user_environ, moment)[name].effect for moment in moments) == effects


def test_plan_for_other_devices_sets_nothing():
    user_environ = {FALLBACK_VARIABLE: "", HIGH_WATERMARK_VARIABLE: "2.5"}
    for device in ("cpu", "cuda:1"):
        planned = plan_mps_variables(user_environ, device, IN_USE)
        assert planned.variables_to_set == {}
        unused = [(user_environ.get(name), NOT_FOR_DEVICE, "") for name in VARIABLES]
        assert [(setting.value, setting.effect, setting.remedy) for setting in planned.settings] == unused


def test_late_variables_require_restart():
    for moment in (ALLOCATOR_UNKNOWN, IN_USE):
        assert {setting.remedy for setting in plan_mps_variables({}, "mps", moment).settings} == {RESTART_REMEDY}
    assert [setting.source for setting in plan_mps_variables(shell("0.7", None)).settings] == ["set", "kept", "set"]


@pytest.mark.parametrize(
    ("user_environ", "allocator_started", "observed", "high"),
    [
        ({}, False, [], 1.0),
        (shell("0.7", None), False, [], 0.7),
        (shell("0", None), False, [], 0.0),
        (shell("0.7", None), True, ["0.7"], 0.7),
        (shell("0.7", None), True, [None], None),
        (shell("0.7", None), None, [None, "0.7"], None),
        *((shell(rejected, None), False, [], None) for rejected in ("2.5", "nan")),
        (shell(None, "2.5"), False, [], None),
    ],
)
def test_high_watermark_is_value_of_torch(user_environ, allocator_started, observed, high):
    state = TorchState(
        allocator_started is not False, allocator_started, {HIGH_WATERMARK_VARIABLE: frozenset(observed)}
    )
    assert plan_mps_variables(user_environ, "mps", state).high_watermark == high


def test_plan_masks_secrets():
    planned = plan_mps_variables({FALLBACK_VARIABLE: "hf_abcdefgh", HIGH_WATERMARK_VARIABLE: "token=abcdefgh"})

    assert "abcdefgh" not in f"{planned} {planned.to_dict()}"


def test_plan_report_has_one_row_per_variable():
    (table,) = plan_mps_variables({HIGH_WATERMARK_VARIABLE: "0"}).to_report().tables
    (unused,) = plan_mps_variables({LOW_WATERMARK_VARIABLE: "0.5"}, "cpu").to_report().tables

    assert table.columns == ("variable", "value", "set by", "effect", "note")
    assert table.rows == (
        ("PYTORCH_ENABLE_MPS_FALLBACK", "1", "openmed_nb", "pending", ""),
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0", "you", "pending", "no limit"),
        ("PYTORCH_MPS_LOW_WATERMARK_RATIO", "0.9", "openmed_nb", "pending", ""),
    )
    assert unused.rows[1:] == (
        ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "(not set)", "default", "not applicable", ""),
        ("PYTORCH_MPS_LOW_WATERMARK_RATIO", "0.5", "you", "not applicable", ""),
    )


def test_parse_ratio_is_linear_in_length():
    assert plan_mps_variables({HIGH_WATERMARK_VARIABLE: "9" * 100_000 + "x"}).settings[1].effect == CONFLICT
    assert parse_ratio("9" * 100_000 + "x") == math.inf
