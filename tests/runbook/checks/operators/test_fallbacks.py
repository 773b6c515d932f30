import contextlib
import json
import threading
import warnings

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.checks.operators.fallbacks import FallbackLog, fallbacks
from openmed_nb.runbook.checks.operators.recorders import FallbackRecorder
from openmed_nb.runbook.checks.operators.table import operator_table

pytestmark = pytest.mark.real_computer

EIGH = "aten::_linalg_eigh.eigenvalues"
FALL = "The operator '{}' is not currently supported on the MPS backend and will fall back to run on the CPU."


class Values(nn.Module):
    """Module with an operator that falls back."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, rows):
        """Return the sum of the eigenvalues of a symmetric matrix."""
        made = self.inner(rows)
        return torch.linalg.eigvalsh(made @ made.T + torch.diag(torch.arange(3.0, device=rows.device))).sum()


class Odd(nn.Module):
    """Model with operators that fall back, also in the backward pass."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3, max_norm=1.0)
        self.values = nn.ModuleList([Values(), Values()])

    def forward(self, ids):
        """Return a loss."""
        words = self.words(ids)
        put = torch.zeros(3, device=ids.device).put_(torch.tensor([1], device=ids.device), words[0, :1])
        return put.sum() + self.values[0](words) + 2 * self.values[1](words) + self.values[1](words)


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
    """Return the number of fallbacks by operator, phase and module."""
    return {(entry.operator, entry.phase, str(entry.module_location)): entry.count for entry in log.entries}


def get_global_state():
    """Return the global state that a fallback log changes."""
    hooks = nn.modules.module
    return [
        torch.is_warn_always_enabled(),
        warnings.showwarning,
        list(warnings.filters),
        dict(hooks._global_forward_hooks),
        dict(hooks._global_forward_pre_hooks),
        torch.utils._python_dispatch._len_torch_dispatch_stack(),
    ]


def test_fallbacks_are_counted_by_operator_module_and_phase(device):
    model = Odd()
    with fallbacks(model) as log:
        run_model(model).backward()
    counts = count_fallbacks(log)

    assert {key: count for key, count in counts.items() if key[1] == "forward"} == {
        ("aten::embedding_renorm_", "forward", "words (Embedding)"): 1,
        ("aten::put_", "forward", "(Odd)"): 1,
        (EIGH, "forward", "values.0 (Values)"): 1,
        (EIGH, "forward", "values.1 (Values)"): 2,
    }
    assert counts["aten::take", "backward", ""] == 1
    assert {phase for _, phase, _ in counts} == {"forward", "backward"}
    assert log.count == sum(device.fallbacks.values())


def test_names_are_relative_to_outermost_module_without_model(log):
    run_model(Odd())
    run_fallback()

    assert count_fallbacks(log)[EIGH, "forward", "values.1 (Values)"] == 2
    assert count_fallbacks(log)["aten::mode", "elsewhere", ""] == 1


def test_fallback_inside_another_operator_is_recorded(log):
    with torch.inference_mode():
        torch.linalg.eigvalsh(torch.eye(3, device="mps"))

    assert (log.operators, log.count) == ((EIGH,), 1)


def test_simulated_device_has_no_durations(log):
    run_fallback()

    assert "SIMULATED" in str(log)
    assert log.verdict in str(log)
    assert "seconds" not in log._repr_html_()
    assert {entry.seconds for entry in log.entries} == {None}
    assert json.loads(json.dumps(log.to_dict()))["simulated"] is True


def test_log_can_be_read_inside_the_block(log):
    assert log.verdict.startswith("No operator ran on MPS")
    torch.ones(3, device="mps").exp()
    assert log.verdict == "No operator fell back to the CPU."
    run_fallback()
    assert log.verdict == "1 call fell back to the CPU: aten::mode."


@pytest.mark.usefixtures("device")
def test_other_warnings_are_not_intercepted():
    with warnings.catch_warnings(record=True) as caught, fallbacks() as log:
        warnings.warn("unrelated warning", UserWarning, stacklevel=1)
        run_fallback()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_fallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fallbacks() as strict:
            run_fallback()
            with pytest.raises(UserWarning, match="unrelated warning"):
                warnings.warn("unrelated warning", UserWarning, stacklevel=1)

    assert [str(warning.message) for warning in caught] == ["unrelated warning"]
    assert count_fallbacks(log) == {("aten::mode", "elsewhere", ""): 2}
    assert strict.count == 1


def test_nested_logs_both_record_a_fallback(log):
    run_fallback()
    with fallbacks() as inner:
        run_fallback()
    run_fallback()

    assert (log.count, inner.count) == (3, 1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, None])
def test_settings_are_restored(error):
    before = get_global_state()
    with pytest.raises(error) if error else contextlib.nullcontext(), fallbacks() as log:
        run_fallback()
        if error:
            raise error

    assert get_global_state() == before
    assert log.count == 1
    with pytest.warns(UserWarning, match="aten::mode"):  # The first warning of torch is still issued.
        run_fallback()


def test_warn_always_is_not_disabled():
    torch.set_warn_always(True)
    try:
        with fallbacks(), fallbacks():
            pass
        assert torch.is_warn_always_enabled()
    finally:
        torch.set_warn_always(False)


class Failing(nn.Module):
    """Module that falls back, and then raises."""

    def forward(self, numbers):
        numbers.mode()
        raise ValueError("on purpose")


def test_failing_module_is_removed_from_the_stack(log):
    numbers = torch.ones(3, device="mps")
    with pytest.raises(ValueError, match="on purpose"):
        nn.Sequential(Failing())(numbers)
    numbers.mode()

    assert count_fallbacks(log) == {("aten::mode", "forward", "0 (Failing)"): 1, ("aten::mode", "elsewhere", ""): 1}


def test_operator_that_raises_is_in_the_log():
    model = Odd()
    with (
        nb.simulated_mps(fallback=False),
        pytest.raises(NotImplementedError, match="aten::put_"),
        fallbacks(model) as log,
    ):
        run_model(model)

    assert log.count == 1
    assert {(entry.operator, entry.outcome, str(entry.module_location)) for entry in log.entries} == {
        ("aten::embedding_renorm_", "fell back to the CPU", "words (Embedding)"),
        ("aten::put_", "raised an error", "(Odd)"),
    }
    assert "1 call raised an error: aten::put_. Set PYTORCH_ENABLE_MPS_FALLBACK=1" in log.verdict


@pytest.mark.parametrize("there", [True, False])
def test_other_devices_have_no_fallbacks(there):
    with nb.simulated_mps() if there else contextlib.nullcontext(), fallbacks() as log:
        torch.ones(3).mode()

    assert (log.entries, log.mps_available) == ((), there)
    assert "No operator ran on MPS" in log.verdict


def test_fallbacks_accepts_pipeline_and_rejects_others(keyword_model):
    before = get_global_state()
    with fallbacks(nb.load_pipeline(str(keyword_model), device="cpu")) as log:
        pass
    with pytest.raises(ConfigurationError, match="int is not a model"), fallbacks(5):
        pass

    assert log.entries == ()
    assert get_global_state() == before


@pytest.mark.usefixtures("device")
def test_other_threads_are_not_recorded():
    with warnings.catch_warnings(record=True) as caught, fallbacks() as log:
        thread = threading.Thread(target=warnings.warn, args=(FALL.format("aten::mode"), UserWarning))
        thread.start()
        thread.join()

    assert log.entries == ()
    assert [FALL.format("aten::mode")] == [str(warning.message) for warning in caught]


def make_recorder(*operators):
    """Return a recorder of operators that took one second each and that torch has not warned about yet."""
    record = FallbackRecorder(operator_table())
    for operator in operators:
        record.begin(operator).seconds = 1.0
    return record


def test_late_warnings_match_operators_in_order():
    record = make_recorder("aten::mode", "aten::t", "aten::mode")
    calls = list(record.pending)
    record.record_warning("aten::mode")
    record.record_warning("aten::mode")

    assert [event.call for event in record.events] == calls
    assert record.pending == []


def test_duration_of_operator_counts_once():
    record = make_recorder("aten::t")
    record.record_warning("aten::take")
    record.record_warning("aten::take")
    log = FallbackLog(mps_available=True, simulated=False, _recorder=record)

    assert [(entry.operator, entry.count, entry.seconds) for entry in log.entries] == [("aten::take", 2, 1.0)]


def test_durations_are_in_html_and_json_only():
    log = FallbackLog(mps_available=True, simulated=False, _recorder=make_recorder("aten::mode", "aten::mode"))

    assert log.to_dict()["entries"][0]["seconds"] == 2.0
    assert "2.0000" in log._repr_html_()
    assert "2.0000" not in str(log)


@pytest.mark.usefixtures("device")
def test_outermost_operator_is_timed():
    record = FallbackRecorder(operator_table())
    with record:
        torch.ones(3, device="mps").exp()
        torch.ones(3).exp()

    assert record.operators == 1
    assert record.last.seconds is not None
