"""Run the samples of torch's own operator database on the simulated MPS device, and compare what it refuses.

Every sample runs forward and backward on the device, and again with one tensor argument at a time on the CPU. Each batch of
operators has a process of its own, so that an abort of the process is found and counted. Two things are compared:

- Operators that fail on the device: with the expected failures of torch's own MPS tests for float32
  (``torch.testing._internal.common_mps``, which ``test/test_mps.py`` reads).
- Arguments that are refused on the other device: with the rules of the dispatcher, as ``FakeTensorMode`` has them in Python.

::

    python scripts/sweep_simulated_mps.py                          # all operators
    python scripts/sweep_simulated_mps.py add mm nn.functional.linear
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from typing import Any

BATCH = 40  # Operators of one process.
MAX_SAMPLES = 3
MAX_MOVED = 6  # Arguments of one sample that are put on the other device, one at a time.
BATCH_SECONDS = 600


def main() -> int:
    """Run the sweep, print its report as JSON, and return 1 if a process was aborted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="names of operators; all of the database if none is given")
    parser.add_argument("--samples", type=int, default=MAX_SAMPLES, help="number of samples per operator")
    parser.add_argument("--child", choices=("list", "run"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _run_child(options.child, options.operators, options.samples)
        return 0
    names = options.operators or _read_lines(_start_child("list", [], options.samples))
    outcomes: dict[str, Any] = {}
    aborts: list[str] = []
    for first in range(0, len(names), BATCH):
        _run_batch(names[first : first + BATCH], options.samples, outcomes, aborts)
    report = summary(names, outcomes, aborts)
    print(json.dumps(report, indent=1))
    return 1 if report["counts"]["aborts"] else 0


def _run_batch(names: list[str], samples: int, outcomes: dict[str, Any], aborts: list[str]) -> None:
    """Run operators in one process, and continue in another process after an operator that aborts it."""
    waiting = list(names)
    while waiting:
        done = [json.loads(line) for line in _read_lines(_start_child("run", waiting, samples))]
        for outcome in done:
            outcomes[outcome["name"]] = outcome
        waiting = waiting[len(done) :]
        if waiting:  # The process ended while it ran the first of them.
            aborts.append(waiting[0])
            waiting = waiting[1:]


def _start_child(kind: str, names: list[str], samples: int) -> str:
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, __file__, "--child", kind, "--samples", str(samples), *names]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603 - it is this file
                command, stdout=output, stderr=subprocess.DEVNULL, timeout=BATCH_SECONDS, check=False
            )
        output.seek(0)
        return output.read()


def _read_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _run_child(kind: str, names: list[str], samples: int) -> None:
    """Write one line per operator: its name, or its outcomes as JSON."""
    # What an operator writes must not be between the lines.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    known = {_name_of(operator): operator for operator in op_db if torch.float32 in operator.dtypes}
    if kind == "list":
        lines.write("".join(f"{name}\n" for name in known))
        return
    expected, in_backward = _expected_failures(op_db)
    for name in names:
        outcome: dict[str, Any] = {
            "name": name,
            "fails_by_tests": name in expected,
            "fails_in_backward_by_tests": name in in_backward,
        }
        for mode in ("simulated", "rules"):
            outcome[mode] = _run_operator(mode, known[name], samples) if name in known else []
        lines.write(f"{json.dumps(outcome)}\n")


def _name_of(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else str(operator.name)


def _expected_failures(operators: list[Any]) -> tuple[set[str], set[str]]:
    """Return the operators that torch's own MPS tests expect to fail for float32, forward and only in a backward pass."""
    import copy

    from openmed_nb.simulation.device import simulated_device

    with simulated_device(fallback=False, environ={}):  # The module defines its lists where there is an MPS device.
        from torch.testing._internal import common_mps

        common_mps.MACOS_VERSION = 15.5
        found = []
        for modifier in (common_mps.mps_ops_modifier, common_mps.mps_ops_grad_modifier):
            plain = [copy.copy(operator) for operator in operators]
            for operator in plain:
                operator.decorators = ()
            found.append({_name_of(operator) for operator in modifier(plain) if _fails(operator)})
    return found[0], found[1]


def _fails(operator: Any) -> bool:
    import unittest

    import torch

    return any(
        unittest.expectedFailure in getattr(decorator, "decorators", ())
        and (decorator.dtypes is None or torch.float32 in decorator.dtypes)
        for decorator in operator.decorators
    )


def _run_operator(mode: str, operator: Any, count: int) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(0)
    try:
        gradients = bool(operator.supports_autograd) and mode == "simulated"
        samples = list(itertools.islice(operator.sample_inputs("cpu", torch.float32, requires_grad=gradients), count))
    except Exception:  # noqa: BLE001 - such as a package that is not installed
        return []
    run = _simulated_sample if mode == "simulated" else _ruled_sample
    return [run(operator, sample) for sample in samples]


def _parts(sample: Any) -> tuple[list[Any], Any]:
    from torch.utils._pytree import tree_flatten

    return tree_flatten((sample.input, sample.args, sample.kwargs))


def _tensor_places(leaves: list[Any]) -> list[int]:
    import torch

    return [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


def _moved(leaf: Any) -> Any:
    """Return an argument for the device: a tensor there, or the device where the CPU was asked for."""
    import torch

    if isinstance(leaf, torch.Tensor):
        return leaf.to("mps")
    names_cpu = isinstance(leaf, (str, torch.device)) and str(leaf) == "cpu"
    return torch.device("mps", 0) if names_cpu else leaf


def _simulated_sample(operator: Any, sample: Any) -> dict[str, Any]:
    """Run a sample on the simulated device, and again with each of its tensors on the CPU."""
    from openmed_nb.simulation.device import simulated_device

    leaves, tree = _parts(sample)
    places = _tensor_places(leaves)
    moved = places[:MAX_MOVED] if len(places) > 1 else []
    outcome: dict[str, Any] = {"dims": [leaves[place].dim() for place in moved], "moved": []}
    for left in (None, *moved):
        with simulated_device(fallback=False, environ={}):
            # Each run has its own copies, because an operator may write into them.
            here = [leaf.detach().clone().requires_grad_(leaf.requires_grad) if place in places else leaf
                    for place, leaf in enumerate(leaves)]  # fmt: skip
            try:
                given = [
                    leaf.to("mps") if place in places and place != left else leaf for place, leaf in enumerate(here)
                ]
                text = _call(operator, given, tree, backward=True)
            except Exception as error:  # noqa: BLE001 - any error is an outcome
                text = f"{type(error).__name__}: {error}"
        if left is None:
            outcome["on_device"] = text
        else:
            outcome["moved"].append(text)
    return outcome


def _ruled_sample(operator: Any, sample: Any) -> dict[str, Any]:
    """Ask torch's FakeTensorMode, which has the rules of the dispatcher in Python, about the same calls."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves, tree = _parts(sample)
    places = _tensor_places(leaves)
    moved = places[:MAX_MOVED] if len(places) > 1 else []
    outcome: dict[str, Any] = {"moved": []}
    for left in (None, *moved):
        mode = FakeTensorMode()
        try:
            given = list(leaves)
            for place in places:
                device = torch.device("cpu") if place == left else torch.device("mps", 0)
                given[place] = FakeTensor(mode, leaves[place].detach().to("meta"), device)
            with mode, torch.no_grad():
                text = _call(operator, given, tree, backward=False)
        except Exception as error:  # noqa: BLE001 - any error is an outcome
            text = f"{type(error).__name__}: {error}"
        if left is None:
            outcome["on_device"] = text[:300]
        else:
            outcome["moved"].append(text[:300])
    return outcome


def _call(operator: Any, leaves: list[Any], tree: Any, backward: bool) -> str:
    import torch
    from torch.utils._pytree import tree_leaves, tree_unflatten

    given, args, kwargs = tree_unflatten(leaves, tree)
    made = operator.op(given, *args, **kwargs)
    if backward:
        wanted = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if wanted:
            sum(leaf.to("cpu").abs().sum() for leaf in wanted).backward()
    return ""


REFUSALS = (
    *("same device", "is on CPU, but expected", "is on cpu but expected on mps", "Passed CPU tensor to MPS op"),
    *("Placeholder storage", "indices should be either on", "too many CPU scalars", "not at the same device"),
    *(
        "two different devices",
        "expected to be in the same device",
        "should be the same",
        "to be on cpu, but it's on",
        "1D CPU int64",
        "device type for generator",
        "expected device",
    ),
)


def refused(text: str) -> bool:
    """Return whether an outcome is the refusal of tensors of two devices."""
    return any(part in text for part in REFUSALS)


class Report:
    """The counts of a sweep, and the operators that differ from torch's tests or from the rules, each with an example."""

    def __init__(self, names: list[str]) -> None:
        self.counts: Counter[str] = Counter(operators=len(names), aborts=0)
        self.accepted_against_rules: dict[str, str] = {}
        self.refused_against_rules: dict[str, str] = {}
        self.failed_otherwise: dict[str, str] = {}
        self.accepted_against_tests: dict[str, str] = {}
        self.refused_against_tests: dict[str, str] = {}

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        """Count the outcomes of an operator."""
        samples = outcome["simulated"]
        rules = outcome["rules"]
        self.counts["operators without samples"] += not samples
        failures = [sample["on_device"] for sample in samples if sample["on_device"]]
        self.counts["operators refused on the device"] += bool(failures)
        if failures and not (outcome["fails_by_tests"] or outcome["fails_in_backward_by_tests"]):
            self.refused_against_tests[name] = failures[0][:200]
        elif samples and not failures and outcome["fails_by_tests"]:
            self.accepted_against_tests[name] = ""
        for place, sample in enumerate(samples):
            self.counts["samples"] += 1
            self.counts["samples accepted on the device"] += not sample["on_device"]
            ruled = rules[place] if place < len(rules) else {"on_device": "without samples", "moved": []}
            if not sample["on_device"]:  # Otherwise its arguments tell nothing.
                self._compare(name, sample, ruled)

    def _compare(self, name: str, sample: dict[str, Any], ruled: dict[str, Any]) -> None:
        """Count the outcomes for arguments of a sample on the other device, one at a time."""
        for argument, text in enumerate(sample["moved"]):
            self.counts["arguments on the other device"] += 1
            if text and not refused(text):
                self.counts["failed otherwise"] += 1
                self.failed_otherwise.setdefault(name, text[:200])
                continue
            self.counts["refused" if text else "accepted"] += 1
            rule = "" if argument >= len(ruled["moved"]) else ruled["moved"][argument]
            if ruled["on_device"] or argument >= len(ruled["moved"]) or (rule and not refused(rule)):
                self.counts["no rule to compare with"] += 1
            elif bool(rule) == bool(text):
                self.counts["as the rules"] += 1
            else:
                self.counts["not as the rules"] += 1
                differing = self.refused_against_rules if text else self.accepted_against_rules
                differing.setdefault(
                    name, f"argument {argument}, {sample['dims'][argument]} dimensions: {text or rule}"
                )


def summary(names: list[str], outcomes: dict[str, Any], aborts: list[str]) -> dict[str, Any]:
    """Return the report of a sweep, ready for JSON."""
    report = Report(names)
    for name, outcome in outcomes.items():
        report.add(name, outcome)
    report.counts["aborts"] = len(aborts)
    return {
        "counts": dict(report.counts),
        "aborts": aborts,
        "accepted though the rules refuse": report.accepted_against_rules,
        "refused though the rules accept": report.refused_against_rules,
        "failed otherwise": report.failed_otherwise,
        "expected to fail by torch's tests, accepted": report.accepted_against_tests,
        "refused, not expected to fail by torch's tests": report.refused_against_tests,
    }


if __name__ == "__main__":
    sys.exit(main())
