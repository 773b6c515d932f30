"""Device requests: accepted names, resolution order, and masking of secrets."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._utils.text import describe_value
from openmed_nb.devices.registry import DEVICE_TYPES
from openmed_nb.devices.registry import get_device as parse_device
from openmed_nb.devices.request import (
    ACCEPTED_SPELLINGS,
    DEFAULT_SOURCE,
    DEVICE_NAMES,
    MASK,
    VISIBLE_VARIABLES,
    DeviceRequest,
    DeviceSetting,
    device_type,
    mask_secrets,
    normalize_device,
    parse_device_argument,
    resolution_order,
    resolve_request,
    visible_variables,
)
from openmed_nb.errors import ConfigurationError, UnknownDeviceError

MEANINGS = {
    **{name: name for name in ("cpu", "cuda", "cuda:0", "cuda:7", "mps", "gpu")},
    **dict.fromkeys(("auto", "default", ""), "auto"),
    "mps:0": "mps",
    "cpu:0": "cpu",
    "cuda:0012": "cuda:12",
}


def test_parse_accepted_spellings():
    for spelling, value in MEANINGS.items():
        for written in (spelling, spelling.upper(), spelling.title(), f" \t{spelling}\n"):
            assert DeviceRequest.parse(written, "argument") == DeviceRequest(value, "argument")


@pytest.mark.parametrize(
    ("spelling", "remedy"),
    [
        ("mpss", "Did you mean 'mps'? Valid values: mps, "),
        (" CUDA:N", "Did you mean 'cuda'? Valid values: cuda, "),
        ("cpu:1", "Did you mean 'cpu'? Valid values: cpu, "),
        ("banana", f"Valid values: {', '.join(ACCEPTED_SPELLINGS)}."),
    ],
)
def test_parse_suggests_closest_name(spelling, remedy):
    with pytest.raises(UnknownDeviceError) as caught:
        DeviceRequest.parse(spelling, "OPENMED_DEVICE")

    assert caught.value.message == f"{describe_value(spelling)} (from OPENMED_DEVICE) is not a valid device name."
    assert caught.value.remedy.startswith(remedy)


def test_parse_names_the_guide_to_mlx():
    with pytest.raises(UnknownDeviceError, match=r"Use 'mps' .*PyTorch models\. docs/explanation/recommendations\.md"):
        DeviceRequest.parse("mlx", "use()")


@given(st.text(max_size=80) | st.from_regex(r"(cuda|cdua|mps|cpu) ?: ?[0-9]{0,6}", fullmatch=True))
def test_parse_any_text(spelling):
    accepted = re.fullmatch(r"\s*(cuda:[0-9]{1,4})\s*", spelling.lower())
    if accepted or spelling.strip().lower() in MEANINGS:
        asks = spelling.strip().lower() not in ("", "auto", "default")
        assert (DeviceRequest.parse(spelling, "argument").value != "auto") is asks
        return
    with pytest.raises(UnknownDeviceError) as caught:
        DeviceRequest.parse(spelling, "argument")

    assert len(str(caught.value).splitlines()) == 1
    assert "Valid values: " in caught.value.remedy


@pytest.mark.parametrize(
    ("argument", "override", "torch_device", "device", "expected"),
    [
        (None, None, None, None, ("auto", DEFAULT_SOURCE)),
        ("cpu", "mps", "cuda", "gpu", ("cpu", "argument")),
        (None, "mps", "cuda", "gpu", ("mps", "use()")),
        (None, None, "cuda", "gpu", ("cuda", "OPENMED_TORCH_DEVICE")),
        ("auto", None, None, "gpu", ("gpu", "OPENMED_DEVICE")),
        ("", None, " ", "default", ("auto", DEFAULT_SOURCE)),
        (None, "auto", "cuda", None, ("auto", "use()")),
        ("cpu", "auto", None, "nonsense", ("cpu", "argument")),
        (None, None, "mps", "nonsense", ("mps", "OPENMED_TORCH_DEVICE")),
    ],
)
def test_resolution_order(argument, override, torch_device, device, expected):
    variables = {"OPENMED_TORCH_DEVICE": torch_device, "OPENMED_DEVICE": device}
    environ = {name: value for name, value in variables.items() if value is not None}
    session = override and DeviceRequest(override, "use()")
    settings = resolution_order(environ, DeviceSetting("argument", argument), session)
    assert resolve_request(settings) == DeviceRequest(*expected)


def test_invalid_variable_is_an_error():
    with pytest.raises(UnknownDeviceError, match="from OPENMED_DEVICE"):
        resolve_request(resolution_order({"OPENMED_TORCH_DEVICE": "auto", "OPENMED_DEVICE": "nonsense"}))


def test_parse_error_masks_secret():
    with pytest.raises(UnknownDeviceError) as caught:
        DeviceRequest.parse("hf_abcdefgh", "OPENMED_DEVICE")

    assert "abcdefgh" not in str(caught.value)


def test_parse_device_argument():
    for value, device in (
        ("cuda", "cuda"),
        (-1, "cpu"),
        (0, "gpu"),
        (1, "cuda:1"),
        (np.int64(2), "cuda:2"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("mps"), "mps"),
        (torch.zeros(1), "cpu"),
        (SimpleNamespace(device="mps"), "mps"),
        (SimpleNamespace(device=torch.device("cuda", 0)), "cuda:0"),
    ):
        assert parse_device_argument(value) == device
    for value in (None, True, 7.5, ["cpu"], SimpleNamespace(), SimpleNamespace(device=7), object):
        with pytest.raises(ConfigurationError, match="objects have no 'device' attribute"):
            parse_device_argument(value)


def test_normalize_device():
    others = {"cpu:0": "cpu", "mps:0": "mps", "cuda": "cuda:0"}
    for spelling in (*others, "cpu", "cpu:1", "mps", "cuda:0", "cuda:1"):
        device = others.get(spelling, spelling)
        assert normalize_device(spelling) == device
        assert device_type(spelling) == device_type(device) in {"cpu", "mps", "cuda"}


SECRET = "tRuStNo1"
SECRET_NAMES = "HF_TOKEN AWS_SECRET_ACCESS_KEY DATABASE_PASSWORD PGPASSFILE_PWD GOOGLE_CREDENTIALS http_authorization"
ADDRESSES = "me:{}@hub.example me:{0}@{0}@hub.example/path hub.example/?access_TOKEN={}&page=2 hub.example/hf_{}"
TOKENS = "hf_{} github_pat_11{} ghp_{} glpat-{} sk-proj-{} password={} api_key={}"
PLANTED = [
    *((name, SECRET) for name in SECRET_NAMES.split()),
    *(("HF_ENDPOINT", f"https://{address.format(SECRET)}") for address in ADDRESSES.split()),
    *(("OPENMED_DEVICE", token.format(SECRET)) for token in TOKENS.split()),
]


@pytest.mark.parametrize(("name", "value"), PLANTED)
def test_mask_secrets_hides_secrets(name, value):
    shown = mask_secrets(name, value)
    assert SECRET not in shown
    assert MASK in shown


def test_mask_secrets_preserves_other_values():
    for name, value in (
        ("OPENMED_TORCH_DEVICE", "cuda:1"),
        ("OPENMED_DEVICE", " MPS "),
        ("ACCELERATE_USE_CPU", "true"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("HF_ENDPOINT", "https://hf-mirror.com"),
        ("HF_ENDPOINT", "http://127.0.0.1:8080/hub"),
        ("TRANSFORMERS_OFFLINE", ""),
    ):
        assert mask_secrets(name, value) == value


def test_visible_variables_are_allow_list():
    environ = dict.fromkeys(reversed(VISIBLE_VARIABLES), f"https://x:{SECRET}@y")
    environ |= {"HOME": "/home/me", "PATIENT": "Jane", "HF_TOKEN": SECRET}

    shown = visible_variables(environ)
    assert (list(shown), set(shown.values())) == (list(VISIBLE_VARIABLES), {f"https://{MASK}@y"})
    libraries = {"ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    assert set(VISIBLE_VARIABLES) == {"OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", *libraries}
    assert visible_variables({"HOME": "/home/me"}) == {}


def test_mask_secrets_is_linear_in_length():
    assert mask_secrets("OPENMED_DEVICE", "x" * 100_000) == "x" * 100_000
    assert mask_secrets("HF_ENDPOINT", "x" * 100_000 + "://me:pass@hub") == "x" * 100_000 + "://***@hub"


def test_device_names_cover_registry():
    """Names are defined separately from the classes, which import them."""
    assert DEVICE_NAMES.keys() == DEVICE_TYPES.keys()
    assert [name for name in DEVICE_NAMES if parse_device(name).supports_index] == ["cuda"]
