"""``%load_ext``, ``%reload_ext`` and ``%unload_ext``: silent, light, repeatable, and without a trace."""

import json

import pytest
from IPython.core.interactiveshell import InteractiveShell

HEAVY = ("torch", "transformers", "ipywidgets", "huggingface_hub", "numpy", "pandas")

STATE = """
def state():
    import os
    shell, magics = get_ipython(), get_ipython().magics_manager.magics
    return {
        "magics": {kind: sorted(map(str, magics[kind])) for kind in magics},
        "configurables": [type(one).__name__ for one in shell.configurables],
        "matchers": [str(one) for one in shell.Completer.custom_matchers],
        "events": {name: len(calls) for name, calls in shell.events.callbacks.items()},
        "environment": dict(os.environ),
        "inputs": [len(shell.input_transformers_cleanup), len(shell.input_transformers_post)],
        "variables": sorted(name for name in shell.user_ns if not name.startswith("_")),
    }
"""

NO_NETWORK = """
import sys
def forbid(event, _arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"network: {event}")
sys.addaudithook(forbid)
"""


def last_line(process):
    """Return what the last line of a process says in JSON."""
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_loading_and_unloading_say_nothing(kernel):
    """Loading twice, reloading three times and unloading show nothing at all."""
    lines = ["%unload_ext openmed_nb", "%load_ext openmed_nb", *["%reload_ext openmed_nb"] * 3]
    replies = [kernel.run(line) for line in lines]

    assert [(reply.status, reply.shown, reply.streams) for reply in replies] == [("ok", [], {})] * len(lines)


def test_a_second_load_is_answered_by_ipython_alone(kernel):
    """A second %load_ext is IPython's own one-line notice, and the magics still work."""
    reply = kernel.run("%load_ext openmed_nb")

    assert reply.status == "ok"
    assert "already loaded" in reply.streams["stdout"]
    assert kernel.run("%openmed_device").text.startswith("Device: cpu")


def test_unloading_leaves_nothing_behind(run_ipython):
    """After loading, overriding, reloading and unloading, the shell and the environment are as before."""
    code = f"""{STATE}
before = after = choice = None
%reload_ext storemagic
before = state()
%load_ext openmed_nb
choice = %openmed_device cpu
%reload_ext openmed_nb
%reload_ext openmed_nb
%reload_ext openmed_nb
%unload_ext openmed_nb
after = state()
print(__import__("json").dumps([before, after]))
"""
    before, after = last_line(run_ipython(code))

    assert after == before


def test_reloading_registers_everything_once(shell: InteractiveShell):
    """After three reloads there is one set of magics, one configurable and one matcher."""
    for _ in range(3):
        shell.run_line_magic("reload_ext", "openmed_nb")
    configurables = [one for one in shell.configurables if type(one).__name__ == "OpenMedMagics"]
    matchers = [one for one in shell.Completer.custom_matchers if "openmed" in str(one)]

    assert len(configurables) == 1
    assert len(matchers) == 1
    assert shell.find_line_magic("openmed_device").__self__ is configurables[0]
    assert shell.find_cell_magic("openmed_ner").__self__ is configurables[0]


def test_unloading_removes_line_and_cell_magics(shell: InteractiveShell):
    """After %unload_ext no magic of ours is found, neither as a line nor as a cell."""
    shell.run_line_magic("unload_ext", "openmed_nb")
    ours = [name for kind in shell.magics_manager.magics.values() for name in kind if "openmed" in name]

    assert ours == []


def test_other_magics_of_the_same_shell_stay(shell: InteractiveShell):
    """Unloading takes away our magics alone, also where a person registered one with a like name."""
    shell.register_magic_function(lambda line: line, "line", "openmed_mine")
    shell.run_line_magic("unload_ext", "openmed_nb")

    assert shell.run_line_magic("openmed_mine", "here") == "here"
    del shell.magics_manager.magics["line"]["openmed_mine"]


def test_loading_is_light(run_ipython):
    """%load_ext in a fresh IPython imports at most 60 modules, none of them heavy."""
    code = """
import sys
before = set(sys.modules)
%load_ext openmed_nb
print(__import__("json").dumps(sorted(set(sys.modules) - before)))
"""
    imported = last_line(run_ipython(code))

    assert len(imported) <= 60, imported
    assert not set(HEAVY) & {name.partition(".")[0] for name in imported}


@pytest.mark.parametrize("line", ["", "cpu", "--list", "--explain", "--json", "--reset"])
def test_the_device_is_told_without_network(run_ipython, line):
    """Loading the extension and asking for the device opens no connection and looks no name up."""
    code = f"{NO_NETWORK}\n%load_ext openmed_nb\nanswer = %openmed_device {line}\nprint(str(answer)[:1])"
    process = run_ipython(code, OPENMED_DEVICE="cpu")

    assert process.returncode == 0, process.stderr
    assert "network" not in process.stdout + process.stderr
    assert process.stdout.strip() in ("D", "{")


LAZY = 'c.MagicsManager.lazy_magics = {"openmed_device": "openmed_nb", "openmed_ner": "openmed_nb"}'


def test_lazy_magics_work_without_load_ext(run_ipython):
    """With IPython's lazy_magics setting, the first use of a magic loads the extension."""
    code = """
print(__import__("json").dumps("openmed_nb" in __import__("sys").modules))
choice = %openmed_device cpu
print(__import__("json").dumps(["openmed_nb" in get_ipython().extension_manager.loaded, choice.device]))
"""
    process = run_ipython(code, profile=LAZY)

    assert process.returncode == 0, process.stderr
    assert [json.loads(line) for line in process.stdout.splitlines()] == [False, [True, "cpu"]]


def test_lazy_cell_magics_work_without_load_ext(run_ipython):
    """With IPython's lazy_magics setting, the cell magic works at its first use."""
    code = "get_ipython().run_cell('%%openmed_ner --model bundled_small\\nHe has asthma.')"
    process = run_ipython(code, profile=LAZY)

    assert "[asthma](DISEASE)" in process.stdout, process.stderr


def test_the_override_ends_with_the_extension(kernel):
    """Unloading drops the override: after loading again the shell's wish is in force."""
    kernel.run("%openmed_device auto")
    kernel.run("%unload_ext openmed_nb")
    kernel.run("%load_ext openmed_nb")

    assert kernel.value("__import__('openmed_nb').device().requested_by") == "OPENMED_DEVICE"


def test_setting_that_is_not_valid_is_one_line_on_reload(kernel):
    """A bad value for a setting gives one line when the extension is reloaded, and the magics stay."""
    kernel.run("get_ipython().config.OpenMedMagics.aggregation_strategy = 'frist'")
    try:
        reply = kernel.run("%load_ext openmed_nb\nfrom openmed_nb.interface.extension import load\nload(get_ipython())")
        assert reply.error[0] == "ConfigurationError"
        assert "'frist'" in reply.error[1]
        assert len(reply.error[2]) == 1
        assert kernel.run("%openmed_device").status == "ok"
    finally:
        kernel.run("get_ipython().config.pop('OpenMedMagics', None)")
