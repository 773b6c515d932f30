"""The MPS variables: the pair of watermarks against torch's own check, and what torch sees at which moment."""

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
    UNSET_BOTH_REMEDY,
    UNKNOWN,
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
    """Return what torch raises for the watermarks of an environment: the checks of MPSAllocator.mm:86 and :100."""
    high = strtod(environ.get(HIGH_WATERMARK_VARIABLE, "1.7").encode(), None)
    low = strtod(environ.get(LOW_WATERMARK_VARIABLE, "1.4").encode(), None)
    if not 0 <= high <= 2.0:
        return f"invalid high watermark ratio {high:g}"
    if not 0 <= low <= (2.0 if high == 0 else high):
        return f"invalid low watermark ratio {low:g}"
    return ""


def shell(high, low):
    """Return an environment in which a person set these watermarks."""
    return {
        name: value
        for name, value in ((HIGH_WATERMARK_VARIABLE, high), (LOW_WATERMARK_VARIABLE, low))
        if value is not None
    }


def with_plan(person):
    """Return the environment after the plan for MPS is applied to what a person set."""
    return {**person, **plan_mps_variables(person).variables_to_set}


def settings_of(person, moment=None, device="mps"):
    """Return the settings of a plan by the names of their variables."""
    return {one.name: one for one in plan_mps_variables(person, device, moment).settings}


def check_pair(high, low):
    """Check one pair against torch's own rules."""
    person = shell(high, low)
    environ = with_plan(person)
    planned = settings_of(person)

    assert {name: environ[name] for name in person} == person
    assert not torch_refuses(environ) or torch_refuses(person), person
    assert [planned[name].effect == CONFLICT for name in (HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE)] == [
        bool(torch_refuses(environ))
    ] * 2, person
    assert torch_refuses(environ) in planned[HIGH_WATERMARK_VARIABLE].note, person


def test_pair_on_the_grid():
    """No pair that torch takes is broken, no person's value is changed, and every refusal is foretold word by word."""
    for high, low in PAIRS:
        check_pair(high, low)


@given(UNSET_OR_WRITTEN, UNSET_OR_WRITTEN)
@example("0.7x", None)
@example(None, "1,2")
@example("5e-324", None)
def test_pair_of_any_spelling(high, low):
    """The same holds for whatever a person may write, numbers or not."""
    check_pair(high, low)


@given(WRITTEN.filter(lambda text: 0 <= strtod(text.encode(), None) <= 2.0))
def test_high_alone_is_rescued(high):
    """A high ratio that is legal by itself never ends in torch's error, even where it does in the bare shell."""
    assert torch_refuses(with_plan(shell(high, None))) == ""


@given(WRITTEN)
def test_ratio_is_read_as_c_reads_it(text):
    """A ratio in decimal notation is read as C's strtod reads it, whatever stands behind or instead of the number."""
    assert repr(abs(parse_ratio(text))) == repr(abs(strtod(text.encode(), None)))


def test_what_is_added():
    """Only what a person left unset is added, and the watermarks adapt to what they set."""
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


def test_odd_values_are_told():
    """A value that torch refuses, or reads otherwise than it looks, is kept and explained with a remedy."""
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
        one = settings_of(person)[name]
        assert (one.note, one.remedy) == (note, remedy)
        assert one.value == person.get(name, one.value)


BEFORE = TorchState()
UNTOUCHED = TorchState(torch_loaded=True, allocator_started=False)
ALLOCATOR_UNKNOWN = TorchState(torch_loaded=True, allocator_started=None)
IN_USE = TorchState(torch_loaded=True, allocator_started=True)


def test_effect_where_nobody_watched():
    """Without a watch, what torch sees follows from when it reads the variable and whether the value stood there."""
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


def test_other_devices_need_nothing():
    """For any other device nothing is set and nothing is complained about."""
    persons = (
        {},
        {HIGH_WATERMARK_VARIABLE: "0.7"},
        {FALLBACK_VARIABLE: "", HIGH_WATERMARK_VARIABLE: "2.5", LOW_WATERMARK_VARIABLE: "x"},
    )
    for device, person in itertools.product(("cpu", "cuda", "cuda:1"), persons):
        planned = plan_mps_variables(person, device, IN_USE)
        assert planned.variables_to_set == {}
        idle = [(person.get(name), NOT_FOR_DEVICE, "") for name in VARIABLES]
        assert [(one.value, one.effect, one.remedy) for one in planned.settings] == idle


def test_late_variables_need_a_restart():
    for moment in (ALLOCATOR_UNKNOWN, IN_USE):
        assert {setting.remedy for setting in plan_mps_variables({}, "mps", moment).settings} == {RESTART_REMEDY}
    assert [setting.source for setting in plan_mps_variables({HIGH_WATERMARK_VARIABLE: "0.7"}).settings] == [
        "set",
        "kept",
        "set",
    ]


def test_high_watermark_that_is_in_force():
    """The high watermark is known where torch reads it or has read it, and not where it has read or refuses another."""
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


def test_a_secret_in_a_variable_is_not_shown():
    """A token that was pasted into a variable appears neither in the text nor in the JSON of the plan."""
    planned = plan_mps_variables({FALLBACK_VARIABLE: "hf_abcdefgh", HIGH_WATERMARK_VARIABLE: "token=abcdefgh"})

    assert "abcdefgh" not in f"{planned} {planned.to_dict()}"


def test_a_long_number_is_read_soon():
    """A ratio of a hundred thousand digits is read once, not once for each of its digits."""
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
    ("PYTORCH_MPS_ENABLE_FALLBACK", "2.13.0", "not read by any torch release up to 2.15", f"Use {FALLBACK_VARIABLE}, or unset it."),
    ("PYTORCH_DEBUG_MPS", "2.13.0", "not read by any torch release up to 2.15", "Unset it."),
    ("PYTORCH_MPS_METAL_VERSION", "2.14.1", "read from torch 2.15 on; the installed version is 2.14.1", "Unset it."),
    (PREFILL, "2.12.1", "read from torch 2.13 on; the installed version is 2.12.1", "Unset it."),
    *((name, "2.6.0", "", "") for name in ("PYTORCH_MPS_FAST_MATH", "PYTORCH_DEBUG_MPS_ALLOCATOR")),
    *((name, "2.13.0", "", "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_TEMPS", "MTL_CAPTURE_ENABLED")),
    *((name, torch, "", "") for name, torch in ((PREFILL, "2.13.0+cpu"), ("PYTORCH_MPS_METAL_VERSION", "2.15.0"))),
]


def test_variables_that_torch_does_not_read():
    """A variable of MPS that this torch does not read is listed after the others, with what to do; it changes nothing."""
    for name, torch, note, remedy in UNREAD:
        planned = plan_mps_variables({name: "1"}, "mps", torch=torch)
        others = [(one.name, one.value, one.source, one.effect, one.note, one.remedy) for one in planned.settings[3:]]

        assert others == ([(name, "1", "kept", IGNORED, note, remedy)] if note else []), (name, torch)
        assert planned.variables_to_set == plan_mps_variables({}).variables_to_set
        assert (name in str(planned)) == bool(note)


def test_variables_that_torch_does_not_read_on_other_devices():
    """On another device nothing has to be done about such a variable, and it is told all the same."""
    (other,) = plan_mps_variables({"PYTORCH_MPS_LOG_LEVEL": "hf_abcdefgh"}, "cpu").settings[3:]

    assert (other.effect, other.note, other.remedy) == (NOT_FOR_DEVICE, "not read by any torch release up to 2.15", "")
    assert other.display_value == "***"
