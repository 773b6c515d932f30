import contextlib
import json
import threading
import warnings

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.checks.operators.fallbacks import FallbackLog
from openmed_nb.runbook.checks.operators.recorders import FallbackRecorder
from openmed_nb.runbook.checks.operators.table import operator_table

pytestmark = pytest.mark.real_computer

EIGH = "aten::_linalg_eigh.eigenvalues"
FALL = "The operator '{}' is not currently supported on the MPS backend and will fall back to run on the CPU."


class Values(nn.Module):
    """Takes eigenvalues, in a module of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, rows):
        """Return the sum of the eigenvalues of a symmetric matrix."""
        made = self.inner(rows)
        return torch.linalg.eigvalsh(made @ made.T + torch.diag(torch.arange(3.0, device=rows.device))).sum()


class Odd(nn.Module):
    """A model with modules, and functions, that leave MPS, also in the backward pass."""

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
    """A simulated MPS device on which operators may fall back."""
    with nb.simulated_mps(fallback=True) as device:
        yield device


def run(model):
    """Return what a model returns on the device."""
    return model.to("mps")(torch.tensor([0, 1, 2], device="mps"))


def fall():
    """Call an operator that falls back."""
    torch.ones(3, device="mps").mode()


def seen(ledger):
    """Return how often each operator fell back, by phase and module."""
    return {(entry.operator, entry.phase, str(entry.module_location)): entry.count for entry in ledger.entries}


def settings():
    """Return everything of the process that a ledger changes while it is open."""
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
    with nb.runbook.fallbacks(model) as ledger:
        run(model).backward()
    counts = seen(ledger)

    assert {key: count for key, count in counts.items() if key[1] == "forward"} == {
        ("aten::embedding_renorm_", "forward", "words (Embedding)"): 1,
        ("aten::put_", "forward", "(Odd)"): 1,
        (EIGH, "forward", "values.0 (Values)"): 1,
        (EIGH, "forward", "values.1 (Values)"): 2,
    }
    assert counts["aten::take", "backward", ""] == 1
    assert {phase for _, phase, _ in counts} == {"forward", "backward"}
    assert ledger.count == sum(device.fallbacks.values())


@pytest.mark.usefixtures("device")
def test_outermost_module_gives_the_names_without_a_model():
    with nb.runbook.fallbacks() as ledger:
        run(Odd())
        fall()

    assert seen(ledger)[EIGH, "forward", "values.1 (Values)"] == 2
    assert seen(ledger)["aten::mode", "elsewhere", ""] == 1


@pytest.mark.usefixtures("device")
def test_fallback_inside_of_another_operator_is_seen():
    with nb.runbook.fallbacks() as ledger, torch.inference_mode():
        torch.linalg.eigvalsh(torch.eye(3, device="mps"))

    assert (ledger.operators, ledger.count) == ((EIGH,), 1)


@pytest.mark.usefixtures("device")
def test_simulated_device_has_no_seconds():
    with nb.runbook.fallbacks() as ledger:
        fall()

    assert "SIMULATED" in str(ledger)
    assert ledger.verdict in str(ledger)
    assert "seconds" not in ledger._repr_html_()
    assert {entry.seconds for entry in ledger.entries} == {None}
    assert json.loads(json.dumps(ledger.to_dict()))["simulated"] is True


@pytest.mark.usefixtures("device")
def test_ledger_can_be_read_while_it_is_open():
    with nb.runbook.fallbacks() as ledger:
        assert ledger.verdict.startswith("No operator ran on MPS")
        torch.ones(3, device="mps").exp()
        assert ledger.verdict == "No operator fell back to the CPU."
        fall()
        assert ledger.verdict == "1 call fell back to the CPU: aten::mode."


@pytest.mark.usefixtures("device")
def test_other_warnings_go_where_they_went():
    with warnings.catch_warnings(record=True) as caught, nb.runbook.fallbacks() as ledger:
        warnings.warn("of somebody else", UserWarning, stacklevel=1)
        fall()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fall()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with nb.runbook.fallbacks() as strict:
            fall()
            with pytest.raises(UserWarning, match="of somebody else"):
                warnings.warn("of somebody else", UserWarning, stacklevel=1)

    assert [str(warning.message) for warning in caught] == ["of somebody else"]
    assert seen(ledger) == {("aten::mode", "elsewhere", ""): 2}
    assert strict.count == 1


@pytest.mark.usefixtures("device")
def test_inner_and_outer_ledger_see_a_fallback():
    with nb.runbook.fallbacks() as outer:
        fall()
        with nb.runbook.fallbacks() as inner:
            fall()
        fall()

    assert (outer.count, inner.count) == (3, 1)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, None])
def test_settings_are_restored(error):
    before = settings()
    with pytest.raises(error) if error else contextlib.nullcontext(), nb.runbook.fallbacks() as ledger:
        fall()
        if error:
            raise error

    assert settings() == before
    assert ledger.count == 1
    with pytest.warns(UserWarning, match="aten::mode"):  # torch's own first warning, as if there had been no ledger.
        fall()


def test_warn_always_stays_on():
    torch.set_warn_always(True)
    try:
        with nb.runbook.fallbacks(), nb.runbook.fallbacks():
            pass
        assert torch.is_warn_always_enabled()
    finally:
        torch.set_warn_always(False)


class Failing(nn.Module):
    """Falls back, and fails."""

    def forward(self, numbers):
        numbers.mode()
        raise ValueError("on purpose")


@pytest.mark.usefixtures("device")
def test_module_that_fails_is_left():
    numbers = torch.ones(3, device="mps")
    with nb.runbook.fallbacks() as ledger:
        with pytest.raises(ValueError, match="on purpose"):
            nn.Sequential(Failing())(numbers)
        numbers.mode()

    assert seen(ledger) == {("aten::mode", "forward", "0 (Failing)"): 1, ("aten::mode", "elsewhere", ""): 1}


def test_refused_operator_is_in_the_ledger():
    model = Odd()
    with (
        nb.simulated_mps(fallback=False),
        pytest.raises(NotImplementedError, match="aten::put_"),
        nb.runbook.fallbacks(model) as ledger,
    ):
        run(model)

    assert ledger.count == 1
    assert {(entry.operator, entry.outcome, str(entry.module_location)) for entry in ledger.entries} == {
        ("aten::embedding_renorm_", "fell back to the CPU", "words (Embedding)"),
        ("aten::put_", "raised an error", "(Odd)"),
    }
    assert "1 call raised an error: aten::put_. Set PYTORCH_ENABLE_MPS_FALLBACK=1" in ledger.verdict


@pytest.mark.parametrize("there", [True, False])
def test_other_devices_have_no_fallbacks(there):
    with nb.simulated_mps() if there else contextlib.nullcontext(), nb.runbook.fallbacks() as ledger:
        torch.ones(3).mode()

    assert (ledger.entries, ledger.device_available) == ((), there)
    assert "No operator ran on MPS" in ledger.verdict


def test_pipeline_and_what_is_no_model(keyword_model):
    before = settings()
    with nb.runbook.fallbacks(nb.load_pipeline(str(keyword_model), device="cpu")) as ledger:
        pass
    with pytest.raises(ConfigurationError, match="int is not a model"), nb.runbook.fallbacks(5):
        pass

    assert ledger.entries == ()
    assert settings() == before


@pytest.mark.usefixtures("device")
def test_other_threads_are_left_alone():
    with warnings.catch_warnings(record=True) as caught, nb.runbook.fallbacks() as ledger:
        thread = threading.Thread(target=warnings.warn, args=(FALL.format("aten::mode"), UserWarning))
        thread.start()
        thread.join()

    assert ledger.entries == ()
    assert [FALL.format("aten::mode")] == [str(warning.message) for warning in caught]


def record_of(*operators):
    """Return the record of operators that were called on MPS, a second each, of which torch has not warned yet."""
    record = FallbackRecorder(operator_table())
    for operator in operators:
        record.begin(operator).seconds = 1.0
    return record


def test_late_warnings_are_matched_with_the_operators_in_their_order():
    record = record_of("aten::mode", "aten::t", "aten::mode")
    calls = list(record.pending)
    record.record_warning("aten::mode")
    record.record_warning("aten::mode")

    assert [event.call for event in record.events] == calls
    assert record.pending == []


def test_time_of_an_operator_counts_once_for_all_its_parts():
    record = record_of("aten::t")
    record.record_warning("aten::take")
    record.record_warning("aten::take")
    ledger = FallbackLog(device_available=True, simulated=False, _recorder=record)

    assert [(entry.operator, entry.count, entry.seconds) for entry in ledger.entries] == [("aten::take", 2, 1.0)]


def test_seconds_are_in_html_and_json_only():
    ledger = FallbackLog(device_available=True, simulated=False, _recorder=record_of("aten::mode", "aten::mode"))

    assert ledger.to_dict()["entries"][0]["seconds"] == 2.0
    assert "2.0000" in ledger._repr_html_()
    assert "2.0000" not in str(ledger)


@pytest.mark.usefixtures("device")
def test_time_of_an_outermost_operator_is_taken():
    record = FallbackRecorder(operator_table())
    with record:
        torch.ones(3, device="mps").exp()
        torch.ones(3).exp()

    assert record.operators == 1
    assert record.last.seconds is not None
