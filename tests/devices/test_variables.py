"""Which environment variables are shown, and that nothing secret is among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.request import MASK, SECRET_NAME, SHOWN, masked, shown_variables

SECRET = "tRuStNo1"  # noqa: S105

PLANTED = [
    ("HF_TOKEN", SECRET),
    ("HUGGING_FACE_HUB_TOKEN", SECRET),
    ("AWS_SECRET_ACCESS_KEY", SECRET),
    ("DATABASE_PASSWORD", SECRET),
    ("PGPASSFILE_PWD", SECRET),
    ("GOOGLE_APPLICATION_CREDENTIALS", SECRET),
    ("http_authorization", SECRET),
    ("HF_ENDPOINT", f"https://me:{SECRET}@hub.example"),
    ("HF_ENDPOINT", f"https://me:{SECRET}@{SECRET}@hub.example/path"),
    ("HF_ENDPOINT", f"https://{SECRET}@hub.example"),
    ("HF_ENDPOINT", f"https://hub.example/?token={SECRET}"),
    ("HF_ENDPOINT", f"https://hub.example/?access_TOKEN={SECRET}&page=2"),
    ("HF_ENDPOINT", f"https://hub.example/?api_key={SECRET}"),
    ("HF_ENDPOINT", f"https://hub.example/hf_{SECRET}"),
    ("OPENMED_DEVICE", f"hf_{SECRET}"),
    ("OPENMED_DEVICE", f"github_pat_11{SECRET}"),
    ("OPENMED_DEVICE", f"ghp_{SECRET}"),
    ("OPENMED_DEVICE", f"glpat-{SECRET}"),
    ("OPENMED_DEVICE", f"sk-proj-{SECRET}"),
    ("OPENMED_DEVICE", f"password={SECRET}"),
]


def test_planted_secret():
    """A secret is masked by the name of its variable or by its look."""
    for name, value in PLANTED:
        shown = masked(name, value)
        assert SECRET not in shown, name
        assert MASK in shown, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPENMED_TORCH_DEVICE", "cuda:1"),
        ("OPENMED_DEVICE", " MPS "),
        ("ACCELERATE_USE_CPU", "true"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("HF_ENDPOINT", "https://hf-mirror.com"),
        ("HF_ENDPOINT", "http://127.0.0.1:8080/hub"),
        ("HF_HUB_OFFLINE", "1"),
        ("TRANSFORMERS_OFFLINE", ""),
    ],
)
def test_plain_value(name: str, value: str):
    """A value without a secret is shown as it is."""
    assert masked(name, value) == value


def test_only_the_allowed_variables_are_shown():
    """Of a whole environment only the variables of the allow list remain, in its order."""
    environ = dict.fromkeys(reversed(SHOWN), "1") | {"HOME": "/home/me", "PATIENT": "Jane", "HF_TOKEN": SECRET}

    assert list(shown_variables(environ)) == list(SHOWN)
    libraries = {"ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    assert set(SHOWN) == {"OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", *libraries}
    assert shown_variables({"HOME": "/home/me"}) == {}


@given(
    st.dictionaries(st.text(min_size=1, max_size=20).filter(lambda text: text not in SHOWN), st.just(SECRET)),
    st.sampled_from(SHOWN),
)
def test_no_other_variable_leaks(environ: dict[str, str], name: str):
    """Whatever else the environment holds, it is not shown."""
    assert shown_variables({**environ, name: f"https://x:{SECRET}@y"}) == {name: f"https://{MASK}@y"}


def test_no_allowed_variable_is_secret_by_name():
    """The allow list holds no variable that its name would mask."""
    assert [name for name in SHOWN if SECRET_NAME.search(name)] == []


def test_a_long_value_is_masked_soon() -> None:
    """A value of a hundred thousand characters is read once, not once for each of its characters."""
    assert masked("OPENMED_DEVICE", "x" * 100_000) == "x" * 100_000
    assert masked("HF_ENDPOINT", "x" * 100_000 + "://me:pass@hub") == "x" * 100_000 + "://***@hub"
