"""Plan of the MPS variables: values, effects, notes and remedies."""

import ctypes
import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from openmed_nb.devices.environment import (
    CONFLICT,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    IGNORED,
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


def with_plan(person):
    """Return the environment of the user after the plan for MPS is applied."""
    return {**person, **plan_mps_variables(person).variables_to_set}


def settings_of(person, moment=None, device="mps"):
    """Return the settings of a plan by name."""
    return {setting.name: setting for setting in plan_mps_variables(person, device, moment).settings}


def check_pair(high, low):
    """Assert that the plan for a pair of ratios satisfies the checks of torch."""
    person = shell(high, low)
    environ = with_plan(person)
    planned = settings_of(person)

    assert {name: environ[name] for name in person} == person
    assert not torch_refuses(environ) or torch_refuses(person), person
    assert [planned[name].effect == CONFLICT for name in (HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE)] == [
        bool(torch_refuses(environ))
    ] * 2, person
    assert torch_refuses(environ) in planned[HIGH_WATERMARK_VARIABLE].note, person


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


def test_plan_adds_unset_variables():
    pairs = (
        {HIGH_WATERMARK_VARIABLE: "0.7", LOW_WATERMARK_VARIABLE: "1.4"},
        {HIGH_WATERMARK_VARIABLE: "1.5", LOW_WATERMARK_VARIABLE: "0.5"},
    )
    for person, expected in (
        ({}, {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"}),
        *(
            ({FALLBACK_VARIABLE: value}, {HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"})
            for value in ("0", "")
        ),
        ({HIGH_WATERMARK_VARIABLE: "0.7"}, {FALLBACK_VARIABLE: "1", LOW_WATERMARK_VARIABLE: "0.63"}),
        *(
            ({HIGH_WATERMARK_VARIABLE: high}, {FALLBACK_VARIABLE: "1", LOW_WATERMARK_VARIABLE: "0.9"})
            for high in ("0.0", "1.0", "2.0")
        ),
        *(
            ({LOW_WATERMARK_VARIABLE: low}, {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: high})
            for low, high in (("0.5", "1.0"), ("1.2", "1.2"), ("1.9", "1.9"))
        ),
        *(
            (person, {FALLBACK_VARIABLE: "1"})
            for person in (
                {HIGH_WATERMARK_VARIABLE: "2.5"},
                {HIGH_WATERMARK_VARIABLE: "nan"},
                {LOW_WATERMARK_VARIABLE: "2.5"},
                {LOW_WATERMARK_VARIABLE: "-1"},
                *pairs,
            )
        ),
        ({FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"}, {}),
    ):
        assert plan_mps_variables(person).variables_to_set == expected, person


def test_plan_explains_invalid_values():
    for person, name, note, remedy in (
        (
            {HIGH_WATERMARK_VARIABLE: "0,9"},
            HIGH_WATERMARK_VARIABLE,
            "'0,9' is not a number; torch parses it as 0",
            "Set it to a number from 0 to 2.",
        ),
        (
            {HIGH_WATERMARK_VARIABLE: "many"},
            HIGH_WATERMARK_VARIABLE,
            "'many' is not a number; torch parses it as 0",
            "Set it to a number from 0 to 2.",
        ),
        (
            {LOW_WATERMARK_VARIABLE: "0.5x"},
            LOW_WATERMARK_VARIABLE,
            "'0.5x' is not a number; torch parses it as 0.5",
            "Set it to a number from 0 to 2.",
        ),
        (
            {LOW_WATERMARK_VARIABLE: ""},
            LOW_WATERMARK_VARIABLE,
            "'' is not a number; torch parses it as 0",
            "Set it to a number from 0 to 2.",
        ),
        ({HIGH_WATERMARK_VARIABLE: "0"}, HIGH_WATERMARK_VARIABLE, "no limit", ""),
        (
            {HIGH_WATERMARK_VARIABLE: "nan"},
            HIGH_WATERMARK_VARIABLE,
            "torch will reject it: invalid high watermark ratio nan",
            UNSET_BOTH_REMEDY,
        ),
        (
            {HIGH_WATERMARK_VARIABLE: "2.5"},
            HIGH_WATERMARK_VARIABLE,
            "torch will reject it: invalid high watermark ratio 2.5",
            UNSET_BOTH_REMEDY,
        ),
        (
            {HIGH_WATERMARK_VARIABLE: "2.5"},
            LOW_WATERMARK_VARIABLE,
            "torch will reject it: invalid high watermark ratio 2.5",
            UNSET_BOTH_REMEDY,
        ),
        (
            {LOW_WATERMARK_VARIABLE: "-1"},
            LOW_WATERMARK_VARIABLE,
            "torch will reject it: invalid low watermark ratio -1",
            UNSET_BOTH_REMEDY,
        ),
        (
            {HIGH_WATERMARK_VARIABLE: "0.7", LOW_WATERMARK_VARIABLE: "1.4"},
            LOW_WATERMARK_VARIABLE,
            "torch will reject it: invalid low watermark ratio 1.4",
            UNSET_BOTH_REMEDY,
        ),
        ({FALLBACK_VARIABLE: "false"}, FALLBACK_VARIABLE, "torch treats 'false' as enabled", "Set it to 0 or 1."),
        ({FALLBACK_VARIABLE: ""}, FALLBACK_VARIABLE, "torch treats '' as enabled", "Set it to 0 or 1."),
        ({FALLBACK_VARIABLE: "0"}, FALLBACK_VARIABLE, "", ""),
        ({}, HIGH_WATERMARK_VARIABLE, "", ""),
    ):
        setting = settings_of(person)[name]
        assert (setting.note, setting.remedy) == (note, remedy)
        assert setting.value == person.get(name, setting.value)


BEFORE = TorchState()
UNTOUCHED = TorchState(torch_loaded=True, allocator_started=False)
ALLOCATOR_UNKNOWN = TorchState(torch_loaded=True, allocator_started=None)
IN_USE = TorchState(torch_loaded=True, allocator_started=True)


def test_effect_without_observations():
    for name, value, effects in (
        (FALLBACK_VARIABLE, None, (PENDING, TOO_LATE, TOO_LATE, TOO_LATE)),
        (FALLBACK_VARIABLE, "1", (PENDING, UNKNOWN, UNKNOWN, UNKNOWN)),
        (FALLBACK_VARIABLE, "0", (PENDING, UNKNOWN, UNKNOWN, UNKNOWN)),
        (HIGH_WATERMARK_VARIABLE, None, (PENDING, PENDING, UNKNOWN, TOO_LATE)),
        (HIGH_WATERMARK_VARIABLE, "0.7", (PENDING, PENDING, UNKNOWN, UNKNOWN)),
        (LOW_WATERMARK_VARIABLE, None, (PENDING, PENDING, UNKNOWN, TOO_LATE)),
        (LOW_WATERMARK_VARIABLE, "1.2", (PENDING, PENDING, UNKNOWN, UNKNOWN)),
        (HIGH_WATERMARK_VARIABLE, "2.5", (CONFLICT, CONFLICT, CONFLICT, CONFLICT)),
    ):
        person = {} if value is None else {name: value}
        moments = (BEFORE, UNTOUCHED, ALLOCATOR_UNKNOWN, IN_USE)
        assert tuple(settings_of(person, moment)[name].effect for moment in moments) == effects


def test_plan_for_other_devices_sets_nothing():
    persons = (
        {},
        {HIGH_WATERMARK_VARIABLE: "0.7"},
        {FALLBACK_VARIABLE: "", HIGH_WATERMARK_VARIABLE: "2.5", LOW_WATERMARK_VARIABLE: "x"},
    )
    for device, person in itertools.product(("cpu", "cuda", "cuda:1"), persons):
        planned = plan_mps_variables(person, device, IN_USE)
        assert planned.variables_to_set == {}
        idle = [(person.get(name), NOT_FOR_DEVICE, "") for name in VARIABLES]
        assert [(setting.value, setting.effect, setting.remedy) for setting in planned.settings] == idle


def test_late_variables_require_restart():
    for moment in (ALLOCATOR_UNKNOWN, IN_USE):
        assert {setting.remedy for setting in plan_mps_variables({}, "mps", moment).settings} == {RESTART_REMEDY}
    assert [setting.source for setting in plan_mps_variables({HIGH_WATERMARK_VARIABLE: "0.7"}).settings] == [
        "set",
        "kept",
        "set",
    ]


def test_high_watermark_is_value_of_torch():
    low = {HIGH_WATERMARK_VARIABLE: "0.7"}
    for environ, moment, high in (
        ({}, BEFORE, 1.0),
        (low, BEFORE, 0.7),
        ({HIGH_WATERMARK_VARIABLE: "0"}, BEFORE, 0.0),
        (low, TorchState(True, True, observed_values={HIGH_WATERMARK_VARIABLE: frozenset(["0.7"])}), 0.7),
        (low, TorchState(True, True, observed_values={HIGH_WATERMARK_VARIABLE: frozenset([None])}), None),
        (low, TorchState(True, None, observed_values={HIGH_WATERMARK_VARIABLE: frozenset([None, "0.7"])}), None),
        *(({HIGH_WATERMARK_VARIABLE: refused}, BEFORE, None) for refused in ("2.5", "nan", "inf")),
        ({LOW_WATERMARK_VARIABLE: "2.5"}, BEFORE, None),
    ):
        assert plan_mps_variables(environ, "mps", moment).high_watermark == high


def test_plan_masks_secrets():
    planned = plan_mps_variables({FALLBACK_VARIABLE: "hf_abcdefgh", HIGH_WATERMARK_VARIABLE: "token=abcdefgh"})

    assert "abcdefgh" not in f"{planned} {planned.to_dict()}"


def test_parse_ratio_is_linear_in_length():
    assert plan_mps_variables({HIGH_WATERMARK_VARIABLE: "9" * 100_000 + "x"}).settings[1].effect == CONFLICT
    assert parse_ratio("9" * 100_000 + "x") == math.inf


PREFILL = "PYTORCH_MPS_DISABLE_PREFILL_ATTENTION"
UNREAD = [
    ("PYTORCH_MPS_LOG_LEVEL", "2.15.0", "not read by any torch release up to 2.15", "Unset it."),
    ("PYTORCH_MPS_LOG_LEVEL", None, "not read by any torch release up to 2.15", "Unset it."),
    (
        "PYTORCH_MPS_HIGH_WATERMARK",
        "2.13.0",
        "not read by any torch release up to 2.15",
        f"Use {HIGH_WATERMARK_VARIABLE}, or unset it.",
    ),
    (
        "PYTORCH_MPS_ENABLE_FALLBACK",
        "2.13.0",
        "not read by any torch release up to 2.15",
        f"Use {FALLBACK_VARIABLE}, or unset it.",
    ),
    ("PYTORCH_DEBUG_MPS", "2.13.0", "not read by any torch release up to 2.15", "Unset it."),
    ("PYTORCH_MPS_METAL_VERSION", "2.14.1", "read from torch 2.15 on; the installed version is 2.14.1", "Unset it."),
    (PREFILL, "2.12.1", "read from torch 2.13 on; the installed version is 2.12.1", "Unset it."),
    *((name, "2.6.0", "", "") for name in ("PYTORCH_MPS_FAST_MATH", "PYTORCH_DEBUG_MPS_ALLOCATOR")),
    *((name, "2.13.0", "", "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_TEMPS", "MTL_CAPTURE_ENABLED")),
    *((name, torch, "", "") for name, torch in ((PREFILL, "2.13.0+cpu"), ("PYTORCH_MPS_METAL_VERSION", "2.15.0"))),
]


def test_plan_lists_ignored_variables():
    for name, torch, note, remedy in UNREAD:
        planned = plan_mps_variables({name: "1"}, "mps", torch=torch)
        others = [
            (setting.name, setting.value, setting.source, setting.effect, setting.note, setting.remedy)
            for setting in planned.settings[3:]
        ]

        assert others == ([(name, "1", "kept", IGNORED, note, remedy)] if note else []), (name, torch)
        assert planned.variables_to_set == plan_mps_variables({}).variables_to_set
        assert (name in str(planned)) == bool(note)


def test_plan_lists_ignored_variables_on_other_devices():
    (other,) = plan_mps_variables({"PYTORCH_MPS_LOG_LEVEL": "hf_abcdefgh"}, "cpu").settings[3:]

    assert (other.effect, other.note, other.remedy) == (NOT_FOR_DEVICE, "not read by any torch release up to 2.15", "")
    assert other.display_value == "***"
