import contextlib
import json
import threading
import warnings

import pytest
import torch
from torch import nn

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.checks.operators.fallbacks import FallbackLedger
from openmed_nb.runbook.checks.operators.recorders import FallbackRecord
from openmed_nb.runbook.checks.operators.table import ModulePlace, operator_table

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


def on_mps():
    """Return a model and its input on the device."""
    return Odd().to("mps"), torch.tensor([0, 1, 2], device="mps")


def fall():
    """Call an operator that falls back."""
    torch.ones(3, device="mps").mode()


def seen(ledger):
    """Return how often each operator fell back, by phase and module."""
    return {(entry.operator, entry.phase, str(entry.place)): entry.count for entry in ledger.entries}


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


def test_counts_for_each_operator_module_and_phase(device):
    """Every fallback is counted, by operator, module of the model and phase, also in the backward pass."""
    model, ids = on_mps()
    with nb.runbook.fallbacks(model) as ledger:
        model(ids).backward()

    counts = seen(ledger)
    forward = {key: count for key, count in counts.items() if key[1] == "forward"}

    assert forward == {
        ("aten::embedding_renorm_", "forward", "words (Embedding)"): 1,
        ("aten::put_", "forward", "(Odd)"): 1,
        (EIGH, "forward", "values.0 (Values)"): 1,
        (EIGH, "forward", "values.1 (Values)"): 2,
    }
    assert counts["aten::take", "backward", ""] == 1
    assert {key[1] for key in counts} == {"forward", "backward"}
    assert ledger.count == sum(device.fallbacks.values())


@pytest.mark.usefixtures("device")
def test_model_is_found_where_nobody_names_it():
    """Without a model, the outermost module that is called is taken for it."""
    model, ids = on_mps()
    with nb.runbook.fallbacks() as ledger:
        model(ids)
        fall()

    assert seen(ledger)[EIGH, "forward", "values.1 (Values)"] == 2
    assert seen(ledger)["aten::mode", "elsewhere", ""] == 1


@pytest.mark.usefixtures("device")
def test_part_of_an_operator_is_seen():
    """An operator that falls back inside of another is seen, which the mode alone would not."""
    with nb.runbook.fallbacks() as ledger, torch.inference_mode():
        torch.linalg.eigvalsh(torch.eye(3, device="mps"))

    assert ledger.operators == (EIGH,)
    assert ledger.count == 1


@pytest.mark.usefixtures("device")
def test_text_without_seconds():
    """The text has counts and places and no seconds; of the simulated device there are none at all."""
    model, ids = on_mps()
    with nb.runbook.fallbacks(model) as ledger:
        model(ids)

    assert "SIMULATED" in str(ledger)
    assert str(ledger).splitlines()[2].startswith(f"  5 calls fell back to the CPU: {EIGH}, ")
    assert "seconds" not in ledger._repr_html_()
    assert {entry.seconds for entry in ledger.entries} == {None}
    assert json.loads(json.dumps(ledger.to_dict()))["simulated"] is True


@pytest.mark.usefixtures("device")
def test_ledger_can_be_read_while_it_is_open():
    """The ledger grows while its block runs."""
    with nb.runbook.fallbacks() as ledger:
        assert ledger.verdict.startswith("Only MPS has operators")
        torch.ones(3, device="mps").exp()
        assert ledger.verdict == "Nothing fell back to the CPU."
        fall()
        assert ledger.verdict == "1 call fell back to the CPU: aten::mode."


@pytest.mark.usefixtures("device")
def test_warnings_of_others():
    """Warnings of others go where they went before, as errors too, and those of fallbacks are in the ledger, also silenced."""
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
def test_nested_ledgers():
    """Of two ledgers, the inner one has what happened while it was open, and the outer one has everything."""
    with nb.runbook.fallbacks() as outer:
        fall()
        with nb.runbook.fallbacks() as inner:
            fall()
        fall()

    assert (outer.count, inner.count) == (3, 1)


@pytest.mark.usefixtures("device")
def test_everything_is_given_back():
    """Settings, filters, hooks and modes are as before, whatever ends the block, and the ledger keeps what it saw."""
    before = settings()
    for error in (ValueError, KeyboardInterrupt, SystemExit, None):
        with pytest.raises(error) if error else contextlib.nullcontext(), nb.runbook.fallbacks() as ledger:
            fall()
            if error:
                raise error
        assert settings() == before, error
        assert ledger.count == 1, error
    with pytest.warns(UserWarning, match="aten::mode"):  # torch's own first warning, as if there had been no ledger.
        fall()

    torch.set_warn_always(True)
    try:
        with nb.runbook.fallbacks(), nb.runbook.fallbacks():
            pass
        assert torch.is_warn_always_enabled()
    finally:
        torch.set_warn_always(False)


def test_module_that_fails():
    """A module that fails leaves the names of those after it right."""

    class Failing(nn.Module):
        """Fails."""

        def forward(self, numbers):
            """Fall back, and fail."""
            numbers.mode()
            raise ValueError("on purpose")

    with nb.simulated_mps(fallback=True), nb.runbook.fallbacks() as ledger:
        numbers = torch.ones(3, device="mps")
        with pytest.raises(ValueError, match="on purpose"):
            nn.Sequential(Failing())(numbers)
        numbers.mode()

    assert seen(ledger) == {("aten::mode", "forward", "0 (Failing)"): 1, ("aten::mode", "elsewhere", ""): 1}


def test_error_where_falling_back_is_off():
    """Where falling back is off, torch's error passes through, and the ledger has the operator, its module and a remedy."""
    with nb.simulated_mps(fallback=False):
        model, ids = on_mps()
        with pytest.raises(NotImplementedError, match="aten::put_"), nb.runbook.fallbacks(model) as ledger:
            model(ids)

    assert ledger.count == 1
    assert {(entry.operator, entry.outcome, str(entry.place)) for entry in ledger.entries} == {
        ("aten::embedding_renorm_", "fell back to the CPU", "words (Embedding)"),
        ("aten::put_", "met an error", "(Odd)"),
    }
    assert ledger.verdict.endswith(
        "1 call met an error: aten::put_. Set PYTORCH_ENABLE_MPS_FALLBACK=1 before torch is imported."
    )


def test_other_devices_have_no_fallbacks():
    """Where nothing is computed on MPS, the ledger says that nothing can fall back there."""
    nothing = "Only MPS has operators that fall back to the CPU, and nothing was computed on MPS here."
    for there in (True, False):
        with nb.simulated_mps() if there else contextlib.nullcontext(), nb.runbook.fallbacks() as ledger:
            torch.ones(3).mode()
        assert (ledger.entries, ledger.device_is_there, ledger.verdict) == ((), there, nothing)


def test_pipeline_and_what_is_no_model(keyword_model):
    """A pipeline is as good as its model; anything else is an error, and nothing is changed."""
    before = settings()
    with nb.runbook.fallbacks(nb.load_pipeline(str(keyword_model), device="cpu")) as ledger:
        pass
    with pytest.raises(ConfigurationError, match="int is not a model"), nb.runbook.fallbacks(5):
        pass

    assert ledger.entries == ()
    assert settings() == before


@pytest.mark.usefixtures("device")
def test_other_threads_are_left_alone():
    """A warning of another thread goes where it went before."""
    with warnings.catch_warnings(record=True) as caught, nb.runbook.fallbacks() as ledger:
        thread = threading.Thread(target=warnings.warn, args=(FALL.format("aten::mode"), UserWarning))
        thread.start()
        thread.join()

    assert ledger.entries == ()
    assert [FALL.format("aten::mode")] == [str(warning.message) for warning in caught]


def late_warnings():
    """Return the record of a backward pass in which two operators fell back, of which torch has not warned yet."""
    record = FallbackRecord(operator_table())
    for operator in ("aten::mode", "aten::t", "aten::mode"):
        record.begin(operator).seconds = 1.0
    return record


def test_warnings_that_come_late():
    """Warnings that torch hands over after a backward pass are matched with the operators in their order.

    A warning of what no outermost operator is belongs to the last one, and its time counts once.
    """
    late, part = late_warnings(), FallbackRecord(operator_table())
    sightings = list(late.waiting)
    part.begin("aten::t").seconds = 2.0
    for _ in range(2):
        late.warned("aten::mode")
        part.warned("aten::take")
    ledger = FallbackLedger(device_is_there=True, simulated=False, _record=part)

    assert [fall.sighting for fall in late.falls] == sightings
    assert late.waiting == []
    assert [(entry.operator, entry.count, entry.seconds) for entry in ledger.entries] == [("aten::take", 2, 2.0)]


def test_seconds_are_in_the_html_only():
    """Seconds of a real device stand in the HTML and in the mapping, and not in the text."""
    ledger = FallbackLedger(device_is_there=True, simulated=False, _record=late_warnings())

    assert ledger.entries[0].place == ModulePlace()
    assert ledger.to_dict()["entries"][0]["seconds"] == 2.0
    assert "2.0000" in ledger._repr_html_()
    assert "2.0000" not in str(ledger)


@pytest.mark.usefixtures("device")
def test_time_of_the_outermost_operator_is_taken():
    """The mode takes the time of each outermost operator with a tensor of MPS, and counts them."""
    record = FallbackRecord(operator_table())
    with record:
        torch.ones(3, device="mps").exp()
        torch.ones(3).exp()

    assert record.operators == 1
    assert record.last is not None
    assert record.last.seconds is not None
