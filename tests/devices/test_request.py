"""Spellings of a device, and whose wish counts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.request import (
    NOBODY,
    SPELLINGS,
    DeviceRequest,
    Wish,
    canonical,
    decide,
    device_of,
    kind_of,
    precedence,
)
from openmed_nb.errors import ConfigurationError, UnknownDevice

MEANINGS = {
    "auto": "auto",
    "default": "auto",
    "": "auto",
    "cpu": "cpu",
    "cuda": "cuda",
    "cuda:0": "cuda:0",
    "cuda:7": "cuda:7",
    "cuda:0012": "cuda:12",
    "mps": "mps",
    "mps:0": "mps",
    "gpu": "gpu",
}


def test_spelling():
    """Every accepted spelling is understood in any case and with any space around it."""
    for spelling, value in MEANINGS.items():
        for written in (spelling, spelling.upper(), spelling.title(), f" \t{spelling}\n"):
            assert DeviceRequest.parse(written, "argument") == DeviceRequest(value, "argument")


def test_every_spelling_of_the_error_is_accepted():
    """Whatever the error lists as accepted is accepted, a number standing for N."""
    for spelling in SPELLINGS:
        assert DeviceRequest.parse(spelling.replace("N", "3"), "argument").value in (*MEANINGS.values(), "cuda:3")


SUGGESTIONS = {
    "mpss": "mps",
    "msp": "mps",
    "mps:1": "mps",
    "cpus": "cpu",
    "cpu:0": "cpu",
    "cdua:1": "cuda:1",
    "cude:12": "cuda:12",
    "cuda:": "cuda",
    "cuda:one": "cuda",
    "cuda:-1": "cuda",
    "cuda:12345": "cuda",
    "cuda:\N{ARABIC-INDIC DIGIT THREE}": "cuda",
    "CUDA:N": "cuda",
    "nvidia": "cuda",
    "0": "auto",
    "defualt": "default",
}


def test_unknown_spelling():
    """A bad spelling is an error that names the value, its source, the nearest spelling and all that are accepted."""
    for spelling, suggestion in SUGGESTIONS.items():
        for source in ("argument", "OpenMedConfig", "%openmed_device", "OPENMED_TORCH_DEVICE"):
            with pytest.raises(UnknownDevice) as caught:
                DeviceRequest.parse(spelling, source)

            assert caught.value.what == f"{spelling!r} (from {source}) names no device."
            assert caught.value.remedy == f"Use {suggestion!r}; accepted are {', '.join(SPELLINGS)}."


@given(st.text(max_size=80) | st.from_regex(r"(cuda|cdua|mps|cpu) ?: ?[0-9]{0,6}", fullmatch=True))
def test_any_text(spelling: str):
    """Any text is a device or one short line of error whose suggestion is itself accepted."""
    accepted = re.fullmatch(r"\s*(cuda:[0-9]{1,4})\s*", spelling.lower())
    if accepted or spelling.strip().lower() in MEANINGS:
        asks = spelling.strip().lower() not in ("", "auto", "default")
        assert (DeviceRequest.parse(spelling, "argument").value != "auto") is asks
        return
    with pytest.raises(UnknownDevice) as caught:
        DeviceRequest.parse(spelling, "argument")
    suggestion = re.match(r"Use '([^']+)';", caught.value.remedy)

    assert len(str(caught.value).splitlines()) == 1
    assert suggestion
    assert DeviceRequest.parse(suggestion[1], "argument")


SESSION = DeviceRequest("mps", "use()")
BY_HAND = DeviceRequest("auto", "use()")


@pytest.mark.parametrize(
    ("argument", "override", "environ", "expected"),
    [
        (None, None, {}, ("auto", NOBODY)),
        ("cpu", SESSION, {"OPENMED_TORCH_DEVICE": "cuda", "OPENMED_DEVICE": "gpu"}, ("cpu", "argument")),
        (None, SESSION, {"OPENMED_TORCH_DEVICE": "cuda", "OPENMED_DEVICE": "gpu"}, ("mps", "use()")),
        (None, None, {"OPENMED_TORCH_DEVICE": "cuda", "OPENMED_DEVICE": "gpu"}, ("cuda", "OPENMED_TORCH_DEVICE")),
        (None, None, {"OPENMED_DEVICE": "gpu"}, ("gpu", "OPENMED_DEVICE")),
        ("auto", SESSION, {}, ("mps", "use()")),
        ("auto", None, {"OPENMED_DEVICE": "gpu"}, ("gpu", "OPENMED_DEVICE")),
        ("", None, {"OPENMED_TORCH_DEVICE": " ", "OPENMED_DEVICE": "default"}, ("auto", NOBODY)),
        (None, BY_HAND, {"OPENMED_TORCH_DEVICE": "cuda"}, ("auto", "use()")),
        ("cpu", BY_HAND, {}, ("cpu", "argument")),
        ("cpu", None, {"OPENMED_DEVICE": "nonsense"}, ("cpu", "argument")),
        (None, None, {"OPENMED_TORCH_DEVICE": "mps", "OPENMED_DEVICE": "nonsense"}, ("mps", "OPENMED_TORCH_DEVICE")),
    ],
)
def test_precedence(argument: str | None, override: DeviceRequest | None, environ: dict, expected: tuple[str, str]):
    """An argument beats the override, which beats the two variables in their order, which beat the automatic choice."""
    assert decide(precedence(environ, Wish("argument", argument), override)) == DeviceRequest(*expected)


def test_bad_variable_that_counts():
    """A bad value is an error where nothing stronger hides it."""
    with pytest.raises(UnknownDevice, match="from OPENMED_DEVICE"):
        decide(precedence({"OPENMED_TORCH_DEVICE": "auto", "OPENMED_DEVICE": "nonsense"}))


@pytest.mark.parametrize(
    ("device", "one"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("mps:0", "mps"), ("cpu", "cpu")]
)
def test_canonical(device: str, one: str):
    """Two spellings of one device have one canonical form."""
    assert canonical(device) == canonical(one) == one


def test_a_secret_in_a_bad_spelling_is_not_shown() -> None:
    """A token that was pasted where a device belongs is not repeated by the error."""
    with pytest.raises(UnknownDevice) as caught:
        DeviceRequest.parse("hf_abcdefgh", "OPENMED_DEVICE")

    assert "abcdefgh" not in str(caught.value)


@pytest.mark.parametrize(
    ("thing", "device"),
    [
        ("cuda", "cuda"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("mps"), "mps"),
        (torch.zeros(1), "cpu"),
        (SimpleNamespace(device="mps"), "mps"),
        (SimpleNamespace(device=torch.device("cuda", 0)), "cuda:0"),
    ],
    ids=str,
)
def test_what_has_a_device(thing, device):
    """Names, devices, and what has one."""
    assert device_of(thing) == device


@pytest.mark.parametrize("thing", [None, 7, ["cpu"], SimpleNamespace(), SimpleNamespace(device=7), object])
def test_what_has_no_device(thing):
    """Anything else is a clear error."""
    with pytest.raises(ConfigurationError, match="has no device"):
        device_of(thing)


def test_one_spelling_of_a_device():
    """Each device has one spelling, whether torch or Accelerate named it; its kind is the part before its number."""
    for spelling, device in {
        "cpu": "cpu",
        "cpu:0": "cpu",
        "cpu:1": "cpu:1",
        "mps": "mps",
        "mps:0": "mps",
        "cuda": "cuda:0",
        "cuda:0": "cuda:0",
        "cuda:1": "cuda:1",
    }.items():
        assert canonical(spelling) == device
        assert kind_of(spelling) == kind_of(device) in {"cpu", "mps", "cuda"}


def test_nearest_spelling():
    """The error for a spelling of nothing names the nearest that there is, auto where none is near."""
    for spelling, nearest in {"aut": "auto", "defualt": "default", "zzz": "auto", "gup": "gpu"}.items():
        with pytest.raises(UnknownDevice, match=f"Use '{nearest}'; accepted are auto, default, cpu, cuda, cuda:N, mps"):
            DeviceRequest.parse(spelling, "argument")
