"""Which type a model is loaded in: what "auto" takes, and who is warned of what was not validated."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
import torch

import openmed_nb as nb
from openmed_nb.annotation.loading import create_pipeline
from openmed_nb.errors import ConfigurationError, OpenMedWarning
from openmed_nb.models.config import OpenMedConfig
from openmed_nb.models.loading import LoadSpec
from openmed_nb.models.records import (
    ValidationMetrics,
    ValidationRecord,
    identify_model,
    record_store,
    validation_command,
)
from openmed_nb.session import SESSION

pytestmark = [pytest.mark.usefixtures("quick_collection"), pytest.mark.real_computer]

EVIDENCE = ValidationMetrics(50, "09b4", 900, 0, 60, 0, 0, 0, 0, 12, None, None, 1.4)
NOTE = "no history of asthma ."


@pytest.fixture
def certify(session, keyword_model, data):
    """A function that stores a certificate for a model, the keyword model as a rule, in a type, with a speed."""

    def certify(dtype, speed=1.4, device="cpu", folder=keyword_model):
        spec = LoadSpec.from_name(str(folder), OpenMedConfig())
        identity = identify_model(spec, dtype, device, session.device_manager)
        certificate = ValidationRecord(identity, replace(EVIDENCE, speedup=speed), "2026-03-01", {})
        record_store({"OPENMED_NB_DATA": str(data)}).store(certificate)

    return certify


@pytest.fixture
def loaded_as(session, keyword_model):
    """A function that returns a pipeline over the keyword model, loaded in a type."""

    def loaded_as(dtype, **arguments):
        return create_pipeline(session, str(keyword_model), OpenMedConfig(), dtype=dtype, **arguments)

    return loaded_as


class TestAuto:
    """What dtype="auto" takes."""

    def test_fastest_of_the_validated(self, certify, loaded_as, data):
        """The fastest validated type is taken that is worth it, and float32 where there is none."""
        cases = [
            ({}, "float32"),
            ({"bfloat16": 1.4}, "bfloat16"),
            ({"bfloat16": 1.4, "float16": 1.6, "int8": 1.5}, "float16"),
            ({"bfloat16": 1.04, "int8": 1.2}, "int8"),
            ({"bfloat16": 1.04}, "float32"),
            ({"bfloat16": 1.05}, "float32"),
            ({"bfloat16": 1.06}, "bfloat16"),
            ({"bfloat16": 2.0, "float16": 2.0}, "bfloat16"),
            ({"float16": 0.2}, "float32"),
        ]
        for speeds, taken in cases:
            shutil.rmtree(data, ignore_errors=True)
            for dtype, speed in speeds.items():
                certify(dtype, speed)
            pipe = loaded_as("auto")
            assert pipe.precision.dtype == taken, speeds
            assert pipe.model.dtype == (torch.float32 if taken == "int8" else getattr(torch, taken)), speeds
            assert [one["word"] for one in pipe(NOTE)] == ["asthma"], speeds

    def test_why_is_shown(self, certify, loaded_as):
        """The pipeline tells which type was taken and why, and what is known of the others."""
        certify("bfloat16", 1.4)
        certify("float16", 0.3)

        assert str(loaded_as("auto").precision).splitlines() == [
            "Type: bfloat16 on cpu",
            "  'auto' took it: it is validated here for this model, and the fastest of those that are.",
            "  type      certificate",
            "  bfloat16  On 50 texts it kept 60 of 60 entities.",
            "  float16   On 50 texts it kept 60 of 60 entities. It is not clearly faster than float32.",
            "  int8      There is no certificate.",
        ]

    def test_why_float32(self, loaded_as):
        """Where nothing is validated, float32 is taken, and that is said; it is JSON too."""
        precision = loaded_as("auto").precision

        assert "no reduced type is validated here for this model and faster" in str(precision)
        assert json.loads(json.dumps(precision.to_dict()))["candidates"][0] == {
            "dtype": "bfloat16",
            "faster": False,
            "summary": "There is no certificate.",
        }

    def test_of_a_configuration(self, certify, session, keyword_model):
        """A configuration can say it for all models of a loader, and an argument overrules it."""
        certify("bfloat16")
        config = OpenMedConfig(dtype="auto")

        assert session.load_model(str(keyword_model), config).model.dtype == torch.bfloat16
        assert session.load_model(str(keyword_model), config, dtype="float32").model.dtype == torch.float32

    def test_changed_weights_are_float32_again(self, certify, session, keyword_model, tmp_path):
        """A model whose weights changed is loaded in float32."""
        certify("bfloat16")
        folder = shutil.copytree(keyword_model, tmp_path / "model")
        assert session.load_model(str(folder), OpenMedConfig(dtype="auto")).model.dtype == torch.bfloat16
        with (folder / "config.json").open("a") as file:
            file.write(" ")
        assert session.load_model(str(folder), OpenMedConfig(dtype="auto")).model.dtype == torch.float32

    def test_asked_again_is_the_same_copy(self, certify, session, loaded_as):
        """Asking again gives the same pipeline, also where the type is named, until something else is validated."""
        certify("bfloat16", 1.4)
        pipe = loaded_as("auto")
        assert loaded_as("auto") is loaded_as("bfloat16") is pipe
        certify("float16", 1.6)
        assert loaded_as("auto").model.dtype == torch.float16
        assert len(session.inventory()) == 2

    def test_int8_only_on_the_cpu(self, keyword_model):
        """On another device than the CPU int8 is not among the types that are looked at."""
        with nb.simulated_mps():
            precision = nb.load_pipeline(str(keyword_model), dtype="auto").precision
        SESSION.unload()

        assert [one.dtype for one in precision.candidates] == ["bfloat16", "float16"]
        assert "mps (SIMULATED)" in str(precision)

    def test_annotate(self, certify, data, keyword_model, monkeypatch):
        """A run over many texts can ask for it."""
        monkeypatch.setenv("OPENMED_NB_DATA", str(data))
        certify("int8")
        SESSION.unload()
        found = nb.annotate([NOTE], str(keyword_model), device="cpu", dtype="auto", progress=False)

        assert [one["word"] for one in found[0]] == ["asthma"]
        assert [one.dtype for one in SESSION.inventory()] == ["int8"]

    def test_under_the_simulation_the_first_validated(self, certify, session, loaded_as):
        """On a simulated device no speed is known: the first validated type is taken, and it is said why."""
        session.simulate("8 GiB")
        try:
            for dtype in ("float16", "bfloat16"):
                certify(dtype, None, "mps")
            precision = loaded_as("auto").precision
        finally:
            session.unload()
            session.end_simulation()

        assert (precision.dtype, precision.device) == ("bfloat16", "mps (SIMULATED)")
        assert "the first that is validated here; under the simulation no speed is measured" in str(precision)
        assert "faster" not in str(precision)
        assert precision.to_dict()["candidates"][0]["faster"] is None


class TestWarning:
    """A reduced type without a certificate works, and warns once for each load."""

    def test_it_names_why_and_the_command(self, session, keyword_model, loaded_as):
        """The warning says which model, type and device, why, and the command that validates it; the model works."""
        with pytest.warns(OpenMedWarning) as said:
            pipe = loaded_as("bfloat16")

        name = str(keyword_model)
        what = f"{name!r} is used in bfloat16 on cpu, and there is no certificate. Its answers may differ from those in"
        command = f"nb.runbook.validate_precision({name!r}, texts, dtype='bfloat16')"
        assert [str(one.message) for one in said] == [f"{what} float32. To validate it: {command}"]
        assert Path(said[0].filename) == Path(__file__)
        assert [one["word"] for one in pipe(NOTE)] == ["asthma"]
        assert [one.dtype for one in session.inventory()] == ["bfloat16"]

    def test_once_for_each_load(self, session, loaded_as):
        """A model that is loaded already is used again without a warning; loaded anew, it warns again."""
        with pytest.warns(OpenMedWarning):
            loaded_as("bfloat16")
        nb.annotate([NOTE], loaded_as("bfloat16"), progress=False)
        loaded_as("bfloat16", aggregation_strategy="simple")
        session.unload()
        with pytest.warns(OpenMedWarning):
            loaded_as("bfloat16")

    def test_as_an_error_it_loads_nothing(self, session, loaded_as):
        """Where warnings are errors, nothing is loaded."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", OpenMedWarning)
            with pytest.raises(OpenMedWarning):
                loaded_as("bfloat16")
        assert len(session.inventory()) == 0

    def test_validated_and_float32_do_not_warn(self, certify, loaded_as):
        """float32 never warns, nor does a type with a certificate, however slow it is."""
        certify("bfloat16", 0.5)
        assert loaded_as("bfloat16").precision.requested == "bfloat16"
        assert loaded_as("float32").precision is None

    def test_named_device_is_part_of_the_command(self, loaded_as):
        """A model that is loaded for a named device is validated there."""
        with pytest.warns(OpenMedWarning, match=r"texts, dtype='float16', device='cpu'\)"):
            loaded_as("float16", device="cpu")

    def test_int8_stays_and_is_named_so(self, session, loaded_as):
        """A model in int8 that nobody asked for on a device stays on the CPU when the session moves."""
        with pytest.warns(OpenMedWarning, match="in int8 on cpu"):
            pipe = loaded_as("int8")
        session.simulate("8 GiB")
        try:
            assert str(pipe.device) == "cpu"
            assert [one["word"] for one in pipe(NOTE)] == ["asthma"]
            with pytest.raises(ConfigurationError, match="int8 runs on the CPU alone, and the device is mps"):
                loaded_as("int8")
        finally:
            session.end_simulation()
        assert [one["word"] for one in pipe(NOTE)] == ["asthma"]

    def test_following_to_another_device_warns(self, certify, session, loaded_as):
        """A model that follows the session to a device where its type is not validated warns, there and back."""
        certify("bfloat16")
        pipe = loaded_as("bfloat16")
        with pytest.warns(OpenMedWarning, match=r"in bfloat16 on mps \(SIMULATED\), and it was validated on cpu only"):
            session.simulate("8 GiB")
        session.end_simulation()
        assert str(pipe.device) == "cpu"

    def test_coming_home_warns_and_never_fails(self, session, loaded_as):
        """A model comes back from a simulated device also where warnings are errors, and the simulation is over."""
        with pytest.warns(OpenMedWarning):
            pipe = loaded_as("bfloat16")
        with pytest.warns(OpenMedWarning):
            session.simulate("8 GiB")
        with warnings.catch_warnings():
            warnings.simplefilter("error", OpenMedWarning)
            with pytest.raises(OpenMedWarning, match="in bfloat16 on cpu"):
                session.end_simulation()
        assert (str(pipe.device), nb.device().simulated) == ("cpu", False)
        assert [one["word"] for one in pipe(NOTE)] == ["asthma"]

    def test_files_that_changed_since_the_load(self, certify, session, keyword_model, close_model, tmp_path):
        """The certificate of files that were put in place later does not count for the model in memory."""
        folder = shutil.copytree(close_model, tmp_path / "model")
        with pytest.warns(OpenMedWarning, match="there is no certificate"):
            create_pipeline(session, str(folder), OpenMedConfig(), dtype="bfloat16")
        shutil.copy(keyword_model / "model.safetensors", folder / "model.safetensors")
        certify("bfloat16", folder=folder)
        with pytest.warns(OpenMedWarning):
            session.simulate("8 GiB")
        with pytest.warns(OpenMedWarning, match="on cpu, and its files changed since it was loaded"):
            session.end_simulation()

    def test_move_that_would_warn_as_an_error(self, session, loaded_as):
        """Where warnings are errors, a model does not move to where its type is not validated, and nothing changes."""
        with pytest.warns(OpenMedWarning):
            pipe = loaded_as("bfloat16")
        with warnings.catch_warnings():
            warnings.simplefilter("error", OpenMedWarning)
            with pytest.raises(OpenMedWarning):
                session.simulate("8 GiB")
        assert (str(pipe.device), session.device().device) == ("cpu", "cpu")


def test_command_loads_the_same_files():
    """The command names every setting that says which files are loaded."""
    cases = [
        ({"dtype": "int8"}, "cpu", "dtype='int8', device='cpu'"),
        (
            {"dtype": "bfloat16", "revision": "v2", "allow_pickle": True},
            None,
            "dtype='bfloat16', revision='v2', allow_pickle=True",
        ),
        ({"dtype": "bfloat16", "cache_dir": PurePosixPath("models")}, None, "dtype='bfloat16', cache_dir='models'"),
    ]
    for settings, device, said in cases:
        command = validation_command(LoadSpec.from_name("bundled", OpenMedConfig(**settings)), device)
        assert command == f"nb.runbook.validate_precision('bundled', texts, {said})"
