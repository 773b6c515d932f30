"""Tests of the log of CPU fallbacks on a simulated Mac."""

import contextlib
import json
import warnings

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.fallbacks import FELL_BACK, RAISED_ERROR, fallbacks

pytestmark = pytest.mark.real_computer

EIGH = "aten::_linalg_eigh.eigenvalues"


class Odd(nn.Module):
    """Model with operators that fall back, also in the backward pass."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3, max_norm=1.0)

    def forward(self, ids):
        """Return a loss."""
        words = self.words(ids)
        put = torch.zeros(3, device=ids.device).put_(torch.tensor([1], device=ids.device), words[0, :1])
        matrix = words @ words.T + torch.diag(torch.arange(3.0, device=ids.device))
        return put.sum() + torch.linalg.eigvalsh(matrix).sum() + torch.linalg.eigvalsh(2 * matrix).sum()


@pytest.fixture
def device():
    """A simulated MPS device with fallback enabled."""
    with nb.simulated_mps(fallback=True) as device:
        yield device


@pytest.fixture
def log(device):  # noqa: ARG001 - the log is opened on it
    """The log of the whole test on the simulated device."""
    with fallbacks() as log:
        yield log


def run_model(model):
    """Return the output of a model on the simulated device."""
    return model.to("mps")(torch.tensor([0, 1, 2], device="mps"))


def run_fallback():
    """Run an operator that falls back."""
    torch.ones(3, device="mps").mode()


def count_fallbacks(log):
    """Return the number of fallbacks by operator, the most frequent first."""
    return {entry.operator: entry.count for entry in log.entries}


def get_global_state():
    """Return the global state that a fallback log changes."""
    return [
        torch.is_warn_always_enabled(),
        warnings.showwarning,
        list(warnings.filters),
        torch.utils._python_dispatch._len_torch_dispatch_stack(),
    ]


def test_fallbacks_are_counted_by_operator(device, log):
    run_model(Odd()).backward()
    counts = count_fallbacks(log)

    assert counts == dict(device.fallbacks)
    assert counts == {EIGH: 2, "aten::embedding_renorm_": 1, "aten::put_": 1, "aten::take": 1}
    assert (next(iter(counts)), log.count) == (EIGH, 5)


def test_fallback_inside_another_operator_is_recorded(log):
    with torch.inference_mode():
        torch.linalg.eigvalsh(torch.eye(3, device="mps"))

    assert (log.operators, log.count) == ((EIGH,), 1)


def test_log_can_be_read_inside_the_block(log):
    """Only operators on MPS count."""
    torch.ones(3).mode()
    assert log.verdict.startswith("No operator ran on MPS")
    torch.ones(3, device="mps").exp()
    assert (log.verdict, log.num_mps_operators) == ("No operator fell back to the CPU.", 1)
    run_fallback()
    assert log.verdict == "1 call fell back to the CPU: aten::mode."
    assert log.verdict in str(log)
    assert json.loads(json.dumps(log.to_dict()))["simulated"] is True


@pytest.mark.usefixtures("device")
def test_other_warnings_are_not_intercepted():
    with warnings.catch_warnings(record=True) as caught, fallbacks() as log:
        warnings.warn("unrelated warning", UserWarning, stacklevel=1)
        run_fallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fallbacks() as strict:
            run_fallback()
            with pytest.raises(UserWarning, match="unrelated warning"):
                warnings.warn("unrelated warning", UserWarning, stacklevel=1)

    assert [str(warning.message) for warning in caught] == ["unrelated warning"]
    assert count_fallbacks(log) == count_fallbacks(strict) == {"aten::mode": 1}


def test_arguments_are_rejected_with_the_form_of_the_call():
    with pytest.raises(ConfigurationError, match="context manager") as error_info:
        fallbacks(torch.nn.Linear(2, 2), torch.ones(1, 2))
    assert "with nb.runbook.fallbacks() as log" in error_info.value.remedy


def test_nested_logs_both_record_a_fallback(log):
    run_fallback()
    with fallbacks() as inner:
        run_fallback()
    run_fallback()

    assert (log.count, inner.count) == (3, 1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("warns_always", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_settings_are_restored(error, warns_always):
    torch.set_warn_always(warns_always)
    try:
        before = get_global_state()
        with pytest.raises(error) if error else contextlib.nullcontext(), fallbacks() as log:
            run_fallback()
            if error:
                raise error

        assert get_global_state() == before
    finally:
        torch.set_warn_always(False)
    assert log.count == 1
    with pytest.warns(UserWarning, match="aten::mode"):  # The first warning of torch is still issued.
        run_fallback()


def test_operator_that_raises_is_in_the_log():
    with (
        nb.simulated_mps(fallback=False),
        pytest.raises(NotImplementedError, match="aten::put_"),
        fallbacks() as log,
    ):
        run_model(Odd())

    assert log.count == 1
    assert {(entry.operator, entry.outcome) for entry in log.entries} == {
        ("aten::embedding_renorm_", FELL_BACK),
        ("aten::put_", RAISED_ERROR),
    }
    assert "1 call raised an error: aten::put_. Set PYTORCH_ENABLE_MPS_FALLBACK=1" in log.verdict
