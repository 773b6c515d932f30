"""Selection of the dtype with ``dtype="auto"``, and warnings about dtypes that are not validated."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, OpenMedWarning
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.records import (
    ValidationMetrics,
    ValidationRecord,
    identify_model,
    record_store,
    select_dtype,
)
from openmed_nb.session import SESSION

# OpenMedWarning is an error in tests, unless it is expected.
pytestmark = [pytest.mark.usefixtures("quick_collection"), pytest.mark.real_computer]

EVIDENCE = ValidationMetrics(50, "09b4", 900, 0, 60, 0, 0, 0, 0, None, None, 1.4)
NOTE = "no history of asthma ."


@pytest.fixture
def store_record(session, keyword_model, data):
    """A function that stores a validation record of a model with a dtype and a speedup."""

    def store_record(dtype, speed=1.4, device="cpu", folder=keyword_model):
        spec = LoadSpec.from_name(str(folder), OpenMedConfig())
        identity = identify_model(spec, dtype, device, session.device_manager)
        record = ValidationRecord(identity, replace(EVIDENCE, speedup=speed), "2026-03-01", {})
        record_store({"OPENMED_NB_DATA": str(data)}).store(record)

    return store_record


@pytest.fixture
def manager_of_mac(computers):
    """A function that returns the devices of a Mac with torch 2.13 and a version of macOS."""

    def manager_of_mac(macos):
        mac = replace(computers.MAC, macos_version=macos)
        return computers.Computer(mac, computers.MAC_TORCH, {}).session.device_manager

    return manager_of_mac


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

    def test_auto_selects_first_validated_dtype(self, store_record, load_in_dtype, data):
        cases = [
            ({}, "float32"),
            ({"bfloat16": 1.4}, "bfloat16"),
            ({"bfloat16": 1.4, "float16": 1.6}, "bfloat16"),
            ({"bfloat16": 1.04, "int8": 1.2}, "int8"),
            ({"bfloat16": 1.04}, "float32"),
            ({"bfloat16": 1.05}, "float32"),
            ({"bfloat16": 1.06}, "bfloat16"),
            ({"float16": 0.2}, "float32"),
        ]
        for speeds, taken in cases:
            shutil.rmtree(data, ignore_errors=True)
            for dtype, speed in speeds.items():
                store_record(dtype, speed)
            pipe = load_in_dtype("auto")
            assert pipe.precision.dtype == taken, speeds
            assert pipe.model.dtype == (torch.float32 if taken == "int8" else getattr(torch, taken)), speeds
            assert find_words(pipe) == ["asthma"], speeds

    def test_precision_text_explains_selection(self, store_record, load_in_dtype):
        store_record("bfloat16", 1.4)
        store_record("float16", 0.3)

        assert str(load_in_dtype("auto").precision).splitlines() == [
            "Data type: bfloat16 on cpu",
            "  Selected by 'auto': the first dtype that is validated here for this model.",
            "  dtype     validation",
            "  bfloat16  60 of 60 entities in 50 texts are the same as in float32.",
            "  float16   60 of 60 entities in 50 texts are the same as in float32. It is not clearly faster than float32.",
            "  int8      It has not been validated on this device with these files and versions.",
        ]

    def test_precision_explains_float32(self, load_in_dtype):
        precision = load_in_dtype("auto").precision

        assert "no reduced dtype is both validated here for this model and faster" in str(precision)
        assert json.loads(json.dumps(precision.to_dict()))["candidates"][0] == {
            "dtype": "bfloat16",
            "summary": "It has not been validated on this device with these files and versions.",
        }

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

    def test_auto_reuses_loaded_model(self, store_record, session, load_in_dtype):
        store_record("float16", 1.6)
        pipe = load_in_dtype("auto")
        assert load_in_dtype("auto") is load_in_dtype("float16") is pipe
        store_record("bfloat16", 1.4)
        assert load_in_dtype("auto").model.dtype == torch.bfloat16
        assert len(session.inventory()) == 2

    def test_int8_is_a_candidate_on_cpu_only(self, keyword_model):
        with nb.simulated_mps():
            precision = nb.load_pipeline(str(keyword_model), dtype="auto").precision
        SESSION.unload()

        assert [candidate.dtype for candidate in precision.candidates] == ["bfloat16", "float16"]
        assert "mps (SIMULATED)" in str(precision)

    def test_annotate_accepts_auto(self, store_record, data, keyword_model, monkeypatch):
        monkeypatch.setenv("OPENMED_NB_DATA", str(data))
        store_record("int8")
        SESSION.unload()
        results = nb.annotate([NOTE], str(keyword_model), device="cpu", dtype="auto", progress=False)

        assert [entity["word"] for entity in results[0]] == ["asthma"]
        assert [model.dtype for model in SESSION.inventory()] == ["int8"]

    def test_auto_selects_first_validated_dtype_on_simulated_device(self, store_record, session, load_in_dtype):
        session.simulate("8 GiB")
        try:
            for dtype in ("float16", "bfloat16"):
                store_record(dtype, None, "mps")
            precision = load_in_dtype("auto").precision
        finally:
            session.unload()
            session.end_simulation()

        assert (precision.dtype, precision.device) == ("bfloat16", "mps (SIMULATED)")
        assert "faster" not in str(precision)


def test_record_from_an_older_macos_is_ignored(keyword_model, tmp_path, manager_of_mac):
    """A record does not contain the version of macOS, which can be updated without torch."""
    environ = {"OPENMED_NB_DATA": str(tmp_path)}
    spec = LoadSpec.from_name(str(keyword_model), OpenMedConfig(dtype="auto"))
    selected = {}
    for macos in ((26, 6), (27, 0)):
        manager = manager_of_mac(macos)
        for dtype, speed in (("bfloat16", 2.0), ("float16", 1.5)):
            identity = identify_model(spec, dtype, "mps", manager)
            record = ValidationRecord(identity, replace(EVIDENCE, speedup=speed), "2026-03-01", {})
            record_store(environ).store(record)
        selected[macos[0]] = select_dtype(spec, "mps", manager, environ)[1]

    assert {macos: choice.dtype for macos, choice in selected.items()} == {26: "bfloat16", 27: "float16"}
    assert "pytorch#197796" in selected[27].candidates[0].summary


class TestWarning:
    """Warnings about dtypes without a validation record."""

    def test_warning_names_reason_and_command(self, session, keyword_model, load_in_dtype):
        with pytest.warns(OpenMedWarning) as caught:
            pipe = load_in_dtype("bfloat16")

        name = str(keyword_model)
        what = (
            f"{name!r} is loaded in bfloat16 on cpu, but it has not been validated on this device with these files and"
        )
        command = f"nb.runbook.validate_precision({name!r}, texts, dtype='bfloat16')"
        assert [str(warning.message) for warning in caught] == [
            f"{what} versions. Predictions may differ from float32. To validate it, run {command}"
        ]
        assert Path(caught[0].filename) == Path(__file__).with_name("conftest.py")  # The caller of the package.
        assert find_words(pipe) == ["asthma"]
        assert [model.dtype for model in session.inventory()] == ["bfloat16"]

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

    def test_command_contains_explicit_device(self, load_in_dtype):
        with pytest.warns(OpenMedWarning, match=r"texts, dtype='float16', device='cpu'\)"):
            load_in_dtype("float16", device="cpu")

    def test_int8_model_stays_on_cpu(self, session, load_in_dtype):
        with pytest.warns(OpenMedWarning, match="in int8 on cpu"):
            pipe = load_in_dtype("int8")
        session.simulate("8 GiB")
        try:
            assert str(pipe.device) == "cpu"
            assert find_words(pipe) == ["asthma"]
            with pytest.raises(ConfigurationError, match="int8 is supported on the CPU only, not on mps"):
                load_in_dtype("int8")
        finally:
            session.end_simulation()
        assert find_words(pipe) == ["asthma"]

    def test_move_to_unvalidated_device_warns(self, store_record, session, load_in_dtype):
        store_record("bfloat16")
        pipe = load_in_dtype("bfloat16")
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
        assert find_words(unvalidated) == ["asthma"]

    def test_move_with_warning_as_error_changes_nothing(self, session, unvalidated):
        with pytest.raises(OpenMedWarning):
            session.simulate("8 GiB")
        assert (str(unvalidated.device), session.device().device) == ("cpu", "cpu")
