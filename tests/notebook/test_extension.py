"""``%load_ext``, ``%reload_ext`` and ``%unload_ext``: silent, light, repeatable, and without a trace."""

import json

import pytest

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
        "handled errors": str(shell.custom_exceptions),
        "inputs": [len(shell.input_transformers_cleanup), len(shell.input_transformers_post)],
        "variables": sorted(name for name in shell.user_ns if not name.startswith("_")),
    }
"""

FRESH = f"""{STATE}
import json, sys
network, shown = [], []
before = after = modules = light = line = answer = choice = None
sys.addaudithook(lambda event, _: network.append(event) if event.startswith("socket.") else None)
%reload_ext storemagic
before, modules = state(), set(sys.modules)
%load_ext openmed_nb
light = sorted(set(sys.modules) - modules)
for line in ("", "cpu", "--list", "--explain", "--json", "--reset"):
    answer = get_ipython().run_line_magic("openmed_device", line)
    shown.append(str(answer)[:1])
choice = %openmed_device cpu
%reload_ext openmed_nb
%reload_ext openmed_nb
%reload_ext openmed_nb
%unload_ext openmed_nb
after = state()
print(json.dumps([before, after, light, shown, network]))
"""
"""Loading, asking, reloading and unloading, with what that leaves, imports, answers, and asks the network for."""


@pytest.fixture(scope="module")
def fresh(run_ipython):
    """What a fresh terminal says of loading, asking, reloading and unloading."""
    process = run_ipython(FRESH, OPENMED_DEVICE="cpu")
    assert process.returncode == 0, process.stderr
    names = ("before", "after", "light", "shown", "network")
    return dict(zip(names, json.loads(process.stdout.splitlines()[-1]), strict=True))


def test_loading_and_unloading_say_nothing(kernel):
    """Unloading, loading twice and reloading three times show nothing at all."""
    lines = ["%unload_ext openmed_nb", *["%load_ext openmed_nb\n1;"] * 2, *["%reload_ext openmed_nb"] * 3]
    replies = [kernel.run(line) for line in lines]

    assert [(reply.status, reply.shown, reply.streams) for reply in replies] == [("ok", [], {})] * len(lines)


def test_unloading_leaves_nothing_behind(fresh):
    """After loading, overriding, reloading and unloading, the shell and the environment are as before."""
    assert fresh["after"] == fresh["before"]


def test_loading_is_light(fresh):
    """%load_ext in a fresh IPython imports at most 60 modules, and nothing that draws; tests/test_imports.py names the heavy ones."""
    assert 0 < len(fresh["light"]) <= 60, fresh["light"]
    drawing = {"html", "openmed_nb._render.display", "openmed_nb._render.drawing", "openmed_nb.notebook.preload"}
    assert not drawing & set(fresh["light"])


def test_loading_and_device_need_no_network(fresh):
    """Loading the extension and asking for the device opens no socket and looks no name up."""
    assert fresh["network"] == []
    assert set(fresh["shown"]) == {"D", "{"}


def test_reloading_registers_everything_once(shell):
    """After three reloads there is one set of magics, one configurable and one matcher."""
    for _ in range(3):
        shell.run_line_magic("reload_ext", "openmed_nb")
    configurables = [
        configurable for configurable in shell.configurables if type(configurable).__name__ == "OpenMedMagics"
    ]
    matchers = [matcher for matcher in shell.Completer.custom_matchers if "openmed" in str(matcher)]

    assert len(configurables) == 1
    assert len(matchers) == 1
    assert shell.find_line_magic("openmed_device").__self__ is configurables[0]
    assert shell.find_cell_magic("openmed_ner").__self__ is configurables[0]


def test_unloading_leaves_what_others_do_to_cells(shell):
    """Unloading keeps an input transformer of another package with the same name."""

    def others(lines):
        return lines

    others.__qualname__ = "prepare_cell"
    shell.input_transformers_cleanup.append(others)
    try:
        shell.run_line_magic("unload_ext", "openmed_nb")
        assert others in shell.input_transformers_cleanup
    finally:
        shell.input_transformers_cleanup[:] = [
            transformer for transformer in shell.input_transformers_cleanup if transformer is not others
        ]


def test_unload_keeps_magics_of_the_user(shell):
    """Unloading keeps a user magic with a similar name."""
    shell.register_magic_function(lambda line: line, "line", "openmed_mine")
    shell.run_line_magic("unload_ext", "openmed_nb")

    assert shell.run_line_magic("openmed_mine", "here") == "here"
    del shell.magics_manager.magics["line"]["openmed_mine"]


LAZY = 'c.MagicsManager.lazy_magics = {"openmed_device": "openmed_nb", "openmed_ner": "openmed_nb"}'


def test_lazy_magics_work_without_load_ext(run_ipython):
    """With IPython's lazy_magics setting, the first use of a magic loads the extension."""
    code = """
print("openmed_nb" in __import__("sys").modules)
choice = %openmed_device cpu
print("openmed_nb" in get_ipython().extension_manager.loaded, choice.device)
"""
    process = run_ipython(code, profile=LAZY)

    assert (process.stdout, process.returncode) == ("False\nTrue cpu\n", 0), process.stderr


def test_missing_package_is_one_line_with_its_remedy(kernel):
    """The import of a package of the extra ``notebooks`` names the command; any other error keeps its traceback."""
    replies = [kernel.run(f"import sys\nsys.modules[{name!r}] = None\nimport {name}") for name in ("dask", "wave")]

    assert [reply.error[0] for reply in replies] == ["ConfigurationError", "ModuleNotFoundError"]
    assert "[notebooks]" in replies[0].error[1]
    assert [len(reply.error[2]) == 1 for reply in replies] == [True, False]
    kernel.run("del sys.modules['dask'], sys.modules['wave']")


def test_errors_that_another_extension_handles_stay_its_own(shell):
    shell.set_custom_exc((OSError,), print)
    try:
        shell.run_line_magic("reload_ext", "openmed_nb")
        assert shell.custom_exceptions == (OSError,)
    finally:
        shell.set_custom_exc((), None)
        shell.run_line_magic("reload_ext", "openmed_nb")


def test_reload_ends_the_override(kernel):
    """After reloading, the environment variable decides again."""
    kernel.run("%openmed_device auto")
    kernel.run("%unload_ext openmed_nb")
    kernel.run("%load_ext openmed_nb")

    assert kernel.value("__import__('openmed_nb').device().requested_by") == "OPENMED_DEVICE"


def test_setting_that_is_not_valid_is_one_line_on_reload(kernel):
    """A bad value for a setting gives one line when the extension is reloaded, and the magics stay."""
    kernel.run("get_ipython().config.OpenMedMagics.aggregation_strategy = 'frist'")
    try:
        reply = kernel.run("%load_ext openmed_nb\nfrom openmed_nb.notebook.extension import load\nload(get_ipython())")
        assert reply.error[0] == "ConfigurationError"
        assert "'frist'" in reply.error[1]
        assert len(reply.error[2]) == 1
        assert kernel.run("%openmed_device").status == "ok"
    finally:
        kernel.run("get_ipython().config.pop('OpenMedMagics', None)")
