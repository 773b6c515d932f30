"""Selection of the dtype with ``dtype="auto"``, and warnings about dtypes that are not validated."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import openmed_nb as nb
from helpers import simulated_computers as computers
from helpers.sample_reports import VALIDATION_RECORD
from openmed_nb.errors import ConfigurationError, OpenMedWarning
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.records import (
    identify_model,
    record_store,
    select_dtype,
)

# OpenMedWarning is an error in tests, unless it is expected.
pytestmark = pytest.mark.real_computer

NOTE = "no history of asthma ."


def make_record(identity, speedup):
    """Return a validation record with a speedup."""
    return replace(VALIDATION_RECORD, identity=identity, evidence=replace(VALIDATION_RECORD.evidence, speedup=speedup))


@pytest.fixture
def store_record(session, keyword_model, data):
    """A function that stores a validation record of a model with a dtype and a speedup."""

    def store_record(dtype, speed=1.4, device="cpu", folder=keyword_model):
        spec = LoadSpec.from_name(str(folder), OpenMedConfig())
        identity = identify_model(spec, dtype, device, session.device_manager)
        record_store({"OPENMED_NB_DATA": str(data)}).store(make_record(identity, speed))

    return store_record


@pytest.fixture
def load_in_dtype(load, keyword_model):
    """A function that loads the keyword model in a dtype."""
    return lambda dtype, **arguments: load(keyword_model, dtype=dtype, **arguments)


@pytest.fixture
def unvalidated(load_in_dtype):
    """A pipeline in bfloat16 without a validation record."""
    with pytest.warns(OpenMedWarning, match="on cpu, but it has not been validated"):
        return load_in_dtype("bfloat16")


def find_words(pipe):
    """Return the entities that a pipeline finds in the note."""
    return [entity["word"] for entity in pipe(NOTE)]


class TestAuto:
    """Selection with ``dtype="auto"``."""

    @pytest.mark.parametrize(
        ("speeds", "selected"),
        [
            ({}, "float32"),
            ({"bfloat16": 1.4, "float16": 1.6, "int8": 1.5}, "bfloat16"),
            ({"bfloat16": 1.04, "int8": 1.2}, "int8"),
            ({"bfloat16": 1.05, "float16": 0.2}, "float32"),
            ({"bfloat16": 1.06}, "bfloat16"),
            ({"bfloat16": None, "int8": 1.2}, "int8"),
        ],
    )
    def test_auto_selects_first_validated_dtype(self, store_record, load_in_dtype, speeds, selected):
        for dtype, speed in speeds.items():
            store_record(dtype, speed)
        pipe = load_in_dtype("auto")

        assert pipe.precision.dtype == selected
        assert pipe.model.dtype == (torch.float32 if selected == "int8" else getattr(torch, selected))
        assert find_words(pipe) == ["asthma"]
        assert load_in_dtype(selected) is pipe  # A loaded model is reused.

    def test_precision_explains_selection(self, store_record, load_in_dtype):
        assert "no reduced dtype is both validated here for this model and known to be faster" in str(
            load_in_dtype("auto").precision
        )
        store_record("bfloat16", 1.4)
        assert str(load_in_dtype("auto").precision).splitlines() == [
            "Data type: bfloat16 on cpu",
            "  Selected by 'auto': the first dtype that is validated here for this model and faster: 1.4 times as fast as float32.",
        ]

    def test_auto_in_configuration_is_overridden_by_argument(self, store_record, session, keyword_model):
        store_record("bfloat16")
        config = OpenMedConfig(dtype="auto")

        assert session.load_model(str(keyword_model), config).model.dtype == torch.bfloat16
        assert session.load_model(str(keyword_model), config, dtype="float32").model.dtype == torch.float32

    def test_auto_selects_float32_for_changed_files(self, store_record, session, keyword_model, tmp_path):
        store_record("bfloat16")
        folder = shutil.copytree(keyword_model, tmp_path / "model")
        assert session.load_model(str(folder), OpenMedConfig(dtype="auto")).model.dtype == torch.bfloat16
        with (folder / "config.json").open("a") as file:
            file.write(" ")
        assert session.load_model(str(folder), OpenMedConfig(dtype="auto")).model.dtype == torch.float32

    def test_auto_selects_first_validated_dtype_on_simulated_device(self, store_record, session, load_in_dtype):
        """Speed is not measured there, and int8 runs on the CPU only."""
        session.simulate("8 GiB")
        try:
            for dtype in ("float16", "bfloat16"):
                store_record(dtype, None, "mps")
            precision = load_in_dtype("auto").precision
        finally:
            session.unload()
            session.end_simulation()

        assert (precision.dtype, precision.device) == ("bfloat16", "mps (SIMULATED)")
        assert "speed not measured: the device is simulated" in str(precision)

    def test_record_from_an_older_macos_is_ignored(self, keyword_model, tmp_path):
        """A record does not contain the version of macOS, which can be updated without torch."""
        environ = {"OPENMED_NB_DATA": str(tmp_path)}
        spec = LoadSpec.from_name(str(keyword_model), OpenMedConfig(dtype="auto"))
        selected = {}
        for macos in ((26, 6), (27, 0)):
            mac = replace(computers.MAC, macos_version=macos)
            manager = computers.Computer(mac, computers.MAC_TORCH, environ).session.device_manager
            for dtype, speed in (("bfloat16", 2.0), ("float16", 1.5)):
                record_store(environ).store(make_record(identify_model(spec, dtype, "mps", manager), speed))
            selected[macos[0]] = select_dtype(spec, "mps", manager)[1]

        assert {macos: choice.dtype for macos, choice in selected.items()} == {26: "bfloat16", 27: "float16"}


class TestWarning:
    """Warnings about dtypes without a validation record."""

    def test_warning_names_command_at_the_line_of_the_user(self, keyword_model, load_in_dtype):
        with pytest.warns(OpenMedWarning) as caught:
            pipe = load_in_dtype("bfloat16", device="cpu")

        command = f"nb.runbook.validate_precision({str(keyword_model)!r}, texts, dtype='bfloat16', device='cpu')"
        assert [str(warning.message).endswith(f"run {command}") for warning in caught] == [True]
        assert Path(caught[0].filename) == Path(__file__).with_name("conftest.py")  # The caller of the package.
        assert find_words(pipe) == ["asthma"]

    @pytest.mark.usefixtures("unvalidated")
    def test_warning_is_issued_once_per_load(self, session, load_in_dtype):
        nb.annotate([NOTE], load_in_dtype("bfloat16"), progress=False)
        load_in_dtype("bfloat16", aggregation_strategy="simple")
        session.unload()
        with pytest.warns(OpenMedWarning):
            load_in_dtype("bfloat16")

    def test_warning_as_error_loads_nothing(self, session, load_in_dtype):
        with pytest.raises(OpenMedWarning):
            load_in_dtype("bfloat16")
        assert len(session.inventory()) == 0

    def test_validated_and_float32_do_not_warn(self, store_record, load_in_dtype):
        store_record("bfloat16", 0.5)
        assert load_in_dtype("bfloat16").precision.requested == "bfloat16"
        assert load_in_dtype("float32").precision is None

    def test_int8_model_stays_on_cpu(self, session, load_in_dtype):
        with pytest.warns(OpenMedWarning, match="in int8 on cpu"):
            pipe = load_in_dtype("int8")
        session.simulate("8 GiB")
        try:
            assert str(pipe.device) == "cpu"
            with pytest.raises(ConfigurationError, match="int8 is supported on the CPU only, not on mps"):
                load_in_dtype("int8")
        finally:
            session.end_simulation()
        assert find_words(pipe) == ["asthma"]

    def test_move_to_unvalidated_device_warns(self, store_record, session, load_in_dtype):
        """A warning as error ends the move to a device, and not the return from it."""
        store_record("bfloat16")
        pipe = load_in_dtype("bfloat16")
        with pytest.raises(OpenMedWarning, match="it has not been validated"):
            session.simulate("8 GiB")
        assert (str(pipe.device), session.device().device) == ("cpu", "cpu")
        with pytest.warns(OpenMedWarning, match=r"in bfloat16 on mps \(SIMULATED\), but it has not been validated"):
            session.simulate("8 GiB")
        session.end_simulation()
        assert str(pipe.device) == "cpu"

    def test_return_from_simulation_warns_without_raising(self, session, unvalidated):
        with pytest.warns(OpenMedWarning):
            session.simulate("8 GiB")
        with pytest.raises(OpenMedWarning, match="in bfloat16 on cpu"):
            session.end_simulation()
        assert (str(unvalidated.device), nb.device().simulated) == ("cpu", False)
