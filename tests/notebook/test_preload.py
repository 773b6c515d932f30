"""The import of torch and transformers in the background, in real kernels."""

import os
from pathlib import Path

import pytest

from openmed_nb.notebook.preload import _READ_AT_IMPORT_PATTERN

pytestmark = pytest.mark.real_computer
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

ASK = "%load_ext openmed_nb\nchoice = %openmed_device"

THREADS = "[thread for thread in __import__('threading').enumerate() if thread.name == 'openmed_nb preload']"

JOIN = f"for thread in {THREADS}:\n    thread.join()"

IS_RUNNING = f"bool({THREADS})"

NER = "%openmed_ner --model bundled_small She has asthma."


@pytest.mark.parametrize(
    "line",
    [
        "choice = %openmed_device",
        *(pytest.param(line, marks=pytest.mark.slow) for line in ("sheet = %openmed", "panel = %openmed_panel")),
    ],
)
def test_preload_starts_when_cell_has_returned(running_kernel, line):
    """The next cells find the thread, and after it the modules for the first text, on the same device, without a warning."""
    with running_kernel() as kernel:
        first = kernel.run(f"%load_ext openmed_nb\n{line}\nprint({IS_RUNNING})", interactive=True)
        assert (first.status, first.streams) == ("ok", {"stdout": "False\n"})
        assert kernel.value(IS_RUNNING)
        during = kernel.run("choice = %openmed_device\nprint(choice.device)", interactive=True)
        assert during.streams == {"stdout": "cpu\n"}
        assert kernel.run(JOIN).streams == {}
        modules = "__import__('sys').modules"
        assert kernel.value(f"'transformers.models.bert.modeling_bert' in {modules}")
        mapping = f"{modules}['transformers.conversion_mapping']._checkpoint_conversion_mapping_cache"
        assert kernel.value(f"{mapping} is not None")
        for code in ("choice = %openmed_device auto", "choice = %openmed_device --reset", NER):
            reply = kernel.run(code, interactive=True)
            assert "stderr" not in reply.streams
        assert "asthma" in reply.text


WITHOUT_PRELOAD = {
    "other magics": ("%load_ext openmed_nb\n%openmed_device --help\n%openmed_panel --close", True),
    "unload in the same cell": (f"{ASK}\n%unload_ext openmed_nb", True),
    "a program executes the notebook": (ASK, False),
    "setting": (f"{ASK}\n%config OpenMedMagics.preload = False", True),
}


def test_preload_does_not_start(running_kernel):
    """None of these cells starts it, so that one kernel can run all of them."""
    with running_kernel() as kernel:
        for case, (code, interactive) in WITHOUT_PRELOAD.items():
            assert kernel.run(code, interactive=interactive).status == "ok", case
            assert not kernel.value(IS_RUNNING), case
            assert not kernel.value("'torch' in __import__('sys').modules"), case


def test_preload_is_disabled_by_variable(running_kernel):
    with running_kernel(OPENMED_NB_PRELOAD="0") as kernel:
        assert kernel.run(ASK, interactive=True).status == "ok"
        assert not kernel.value(IS_RUNNING)
        assert not kernel.value("'torch' in __import__('sys').modules")


def test_preload_needs_a_kernel(run_ipython):
    process = run_ipython(f"{ASK}\nget_ipython().events.trigger('post_run_cell', None)\nprint({IS_RUNNING})")
    assert (process.stdout, process.returncode) == ("False\n", 0), process.stderr


def test_preload_ends_after_unload(running_kernel):
    with running_kernel() as kernel:
        kernel.run(ASK, interactive=True)
        kernel.run("%unload_ext openmed_nb")
        kernel.run(JOIN)
        assert not kernel.value("'openmed_nb.annotation.pipeline' in __import__('sys').modules")
        assert kernel.run("import torch").status == "ok"


IMPORTS = ("import torch", "import torch.nn", "from transformers import pipeline", "import transformers.pipelines")


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        ("from transformers import pipeline", 0),
        pytest.param("import torch.nn", 0, marks=pytest.mark.slow),
        pytest.param("import torch", 0.4, marks=pytest.mark.slow),
    ],
)
def test_user_import_waits_for_preload(running_kernel, code, seconds):
    """The user's own imports work at any time of the preload, also those of transformers, which replaces its module."""
    with running_kernel() as kernel:
        kernel.run("import time")
        kernel.run(ASK, interactive=True)
        kernel.run(f"time.sleep({seconds})")
        for statement in (code, *IMPORTS):
            reply = kernel.run(statement, interactive=True)
            assert (reply.status, reply.streams) == ("ok", {}), (statement, reply.error)
        assert kernel.value("pipeline.__module__") == "transformers.pipelines"
        assert "asthma" in kernel.run(NER, interactive=True).text


def test_preload_warns_of_late_variables(running_kernel):
    """A variable that changes after the start has one warning, at the first use. A token is read later, and has none."""
    with running_kernel() as kernel:
        kernel.run("import os")
        kernel.run(ASK, interactive=True)
        set_variables = "os.environ['HF_HOME'] = 'patients'\nos.environ['HF_TOKEN'] = 'hf_secret'"
        assert kernel.run(set_variables, interactive=True).streams == {}
        kernel.run(JOIN)
        warning = kernel.run(NER, interactive=True).streams["stderr"]
        assert "stderr" not in kernel.run(NER, interactive=True).streams
    assert warning.count("OpenMedWarning: HF_HOME changed") == 1
    assert "HF_TOKEN" not in warning
    assert "patients" not in warning
    assert "She has asthma" not in warning, "Python adds the line of the user, which contains the note."


BROKEN_TORCH = """
import builtins
builtins.attempts = getattr(builtins, "attempts", 0) + 1
raise RuntimeError(f"attempt {builtins.attempts} without numpy")
"""


def test_preload_reports_import_error_at_first_use(running_kernel, tmp_path):
    """Nothing is shown before the first use, which reports the error of the thread and not that of a second attempt."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(BROKEN_TORCH, "utf-8")
    with running_kernel(PYTHONPATH=path_with(tmp_path)) as kernel:
        assert kernel.run(ASK, interactive=True).streams == {}
        assert kernel.run(JOIN, interactive=True).streams == {}
        assert kernel.run("choice = %openmed_device", interactive=True).status == "ok"
        name, message, _ = kernel.run(NER, interactive=True).error
        assert name == "TorchImportError"
        assert "attempt 1" in message
        assert "attempt 2" in kernel.run(NER, interactive=True).error[1]


# Ways to start worker processes, with what their cell imports.
WAYS = {
    "with_process('fork')": "",
    "with_process('spawn')": "",
    "with_data_loader(2)": "import torch.utils.data",
    "with_joblib('loky')": "import joblib",
    "with_joblib('multiprocessing')": "import joblib",
    "with_datasets(2)": "import datasets",
}

SECONDS = (0, 0.1, 0.3, 1, 5)

FORKS = [
    pytest.param(way, seconds, marks=() if (way, seconds) == ("with_process('fork')", 0) else pytest.mark.slow)
    for way in WAYS
    for seconds in SECONDS
]


def path_with(folder):
    """Return a search path of Python that starts with a folder."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@needs_fork
@pytest.mark.parametrize(("way", "seconds"), FORKS)
def test_worker_annotates_at_any_time_of_preload(running_kernel, way, seconds):
    """A forked process has all modules or none. It would wait forever for a lock that a thread of its parent holds."""
    with running_kernel(PYTHONPATH=path_with(Path(__file__).parent)) as kernel:
        kernel.run("import fork_runs, time")
        kernel.run(ASK, interactive=True)
        kernel.run(f"time.sleep({seconds})")
        reply = kernel.run(f"{WAYS[way]}\nprint(*fork_runs.{way})", interactive=True)
    words = {line for line in reply.streams.get("stdout", "").split("\n") if "asthma" in line}
    assert (reply.status, words) in [("ok", {"['asthma']"}), ("ok", {"['asthma'] ['asthma']"})], reply
    # Python 3.12 warns of a fork with threads, and ipykernel always has threads.
    assert "Exception ignored" not in reply.streams.get("stderr", "")


ENDLESS_TORCH = "import threading\nthreading.Event().wait()"


@pytest.mark.slow
@needs_fork
def test_fork_during_endless_import_raises_in_child(running_kernel, tmp_path):
    """The fork waits up to its limit. Its child raises an error instead of waiting for a thread that it does not have."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(ENDLESS_TORCH, "utf-8")
    folders = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])
    with running_kernel(PYTHONPATH=path_with(folders)) as kernel:
        kernel.run("import fork_runs, sys, time")
        kernel.run(ASK, interactive=True)
        kernel.run("while 'torch' not in sys.modules:\n    time.sleep(0.05)")
        reply = kernel.run("print(fork_runs.with_process('fork', fork_runs.find_failures))", interactive=True)
    assert reply.streams.get("stdout") == "[['TorchImportError', 'ModuleNotFoundError']]\n", reply


def test_kernel_exits_during_preload(running_kernel):
    with running_kernel() as kernel:
        kernel.run(f"{ASK}\nimport time", interactive=True)
        kernel.run("time.sleep(0.5)")
        kernel.client.shutdown()
        assert kernel.manager.provisioner.process.wait(120) == 0


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("CUDA_VISIBLE_DEVICES", True),
        ("OMP_NUM_THREADS", True),
        ("MKL_NUM_THREADS", True),
        ("HF_HOME", True),
        ("TRANSFORMERS_CACHE", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("HF_TOKEN", False),
        ("HF_TOKEN_PATH", True),
        ("OPENMED_TORCH_DEVICE", False),
        ("MY_HF_HOME", False),
    ],
)
def test_variables_that_are_read_at_import(name, is_read):
    assert bool(_READ_AT_IMPORT_PATTERN.fullmatch(name)) is is_read
