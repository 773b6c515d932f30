"""Check the forecast: models that stay on MPS, the macOS binary of this torch, and torch's own list of what fails on MPS.

    python scripts/check_forecast.py             # about a minute on a CPU

1. Eleven tiny models with random weights: a pass without gradients must have no fallback.
2. Precision and recall against the expected failures in ``torch.testing._internal.common_mps``, over all operators that torch
   has tests for (its OpInfos). They need expecttest: python -m pip install expecttest.

How the second is counted. Each OpInfo is called with the samples that torch draws for MPS, at most 100, in the first of
float32, int64, complex64, bool and float16 that it has. It is predicted to fail if an operator of any sample falls back.
What is always computed on the CPU does not fail, and does not count. It is expected to fail where
UNIMPLEMENTED_XFAILLIST or ON_MPS_XFAILLIST of ``mps_ops_modifier`` name it for that type. Left out are the OpInfos of
UNDEFINED_XFAILLIST, whose results differ for other reasons, those that have none of the types, and samples that say
device="cpu".
"""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openmed_nb.runbook.checks.forecast import FALLS_BACK, OperatorTable, forecast, operator_table
from openmed_nb.runbook.checks.operator_tracer import OperatorTracer, trace_operators
from openmed_nb.simulation.device import simulated_device

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "runbook" / "checks" / "operators" / "forecast_models.py"
TYPES = (torch.float32, torch.int64, torch.complex64, torch.bool, torch.float16)
SAMPLES = 100
PRECISION, RECALL = 0.95, 0.85

Lists = Mapping[str, Mapping[str, list[torch.dtype] | None]]


def main() -> int:
    """Print both checks; the status is 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models-only", action="store_true", help="leave torch's list out")
    only = parser.parse_args().models_only
    start = time.perf_counter()
    print(f"torch {torch.__version__}, {operator_table().source}")
    good = check_models()
    good = (only or check_list(operator_table())) and good
    print(f"{'All is well' if good else 'FAILED'}, after {time.perf_counter() - start:.0f} seconds.")
    return 0 if good else 1


def check_models() -> bool:
    """Print the operators of each model, and whether all stay on MPS."""
    print(f"\n{'model':<14}{'pass':>12}  calls/different operators")
    good = True
    for name, make in models().items():
        predicted = forecast(*make())
        good &= not predicted.problems
        calls = f"{sum(row.count for row in predicted.rows)}/{len(predicted.operators)}"
        print(f"{name:<14}{calls:>12}  {predicted.verdict}")
    return good


def models() -> Mapping[str, Any]:
    """Return the models of the tests, by their names."""
    return runpy.run_path(str(MODELS))["MODELS"]


@dataclass(frozen=True)
class Outcome:
    """The forecast for an OpInfo, and the expectation of torch."""

    name: str
    dtype: torch.dtype
    reasons: tuple[str, ...]
    expected: bool


def check_list(table: OperatorTable) -> bool:
    """Print precision and recall against torch's list, with every difference."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        print(f"\ntorch.testing needs {error.name}: python -m pip install {error.name}")
        return False
    warnings.simplefilter("ignore")
    outcomes = list(judged(op_db, expected_failures(), table))
    foretold = [outcome for outcome in outcomes if outcome.reasons]
    expected = [outcome for outcome in outcomes if outcome.expected]
    both = [outcome for outcome in foretold if outcome.expected]
    precision, recall = len(both) / len(foretold), len(both) / len(expected)
    print(f"\n{__doc__[__doc__.index('How the second') :]}")
    print(f"{len(outcomes)} OpInfos: {len(expected)} expected to fail, {len(foretold)} predicted, {len(both)} both.")
    print(f"precision {precision:.3f} (at least {PRECISION}), recall {recall:.3f} (at least {RECALL})")
    for outcome in foretold:
        if not outcome.expected:
            print(f"  predicted only: {outcome.name} ({outcome.dtype}): {', '.join(outcome.reasons)}")
    for outcome in expected:
        if not outcome.reasons:
            print(f"  expected only: {outcome.name} ({outcome.dtype})")
    return precision >= PRECISION and recall >= RECALL


def expected_failures() -> Lists:
    """Return torch's lists from the source of a function that torch defines only on a Mac."""
    file = Path(torch.__file__).parent / "testing" / "_internal" / "common_mps.py"
    tree = ast.parse(file.read_text("utf-8"))
    function = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "mps_ops_modifier")
    assigned = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AnnAssign))]
    pairs = [(node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value) for node in assigned]
    return {
        name.id: eval(compile(ast.Expression(value), str(file), "eval"), {"torch": torch})  # noqa: S307 - torch's own file
        for name, value in pairs
        if isinstance(name, ast.Name) and isinstance(value, ast.Dict)
    }


def judged(infos: list[Any], lists: Lists, table: OperatorTable) -> Iterator[Outcome]:
    """Yield the forecast for each OpInfo with the expectation of torch."""
    failing = (lists["UNIMPLEMENTED_XFAILLIST"], lists["ON_MPS_XFAILLIST"])
    for info in infos:
        name, types = info.name + info.variant_test_name, info.supported_dtypes("cpu")
        dtype = next((dtype_name for dtype_name in TYPES if dtype_name in types), None)
        if dtype is None or named(name, dtype, lists["UNDEFINED_XFAILLIST"]):
            continue
        yield Outcome(name, dtype, reasons(info, dtype, table), any(named(name, dtype, entry) for entry in failing))


def named(name: str, dtype: torch.dtype, failures: Mapping[str, list[torch.dtype] | None]) -> bool:
    """Return whether a list names an OpInfo for a type; ``None`` means all types."""
    return name in failures and (failures[name] is None or dtype in (failures[name] or ()))


def reasons(info: Any, dtype: torch.dtype, table: OperatorTable) -> tuple[str, ...]:
    """Return the reasons why an OpInfo would fail on MPS; samples that also fail on the CPU are ignored."""
    tracer = OperatorTracer(table.find_composite_key, torch.nn.Module())
    for sample in samples(info, dtype):
        try:
            with torch.inference_mode(), trace_operators(tracer):
                info(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:  # noqa: BLE001, PERF203 - samples for one device can fail in any way on another
            print(f"  {info.name}: {type(error).__name__}", file=sys.stderr)
    return tuple(sorted({operator for operator, _ in tracer.calls if table.classify(operator) == FALLS_BACK}))


def samples(info: Any, dtype: torch.dtype) -> list[Any]:
    """Return the samples that torch draws for MPS, on the CPU: where the simulation ends, its tensors are there."""
    torch.manual_seed(0)
    drawn = []
    with simulated_device("1024 GiB", fallback=True):
        for sample in info.sample_inputs("mps:0", dtype):
            drawn += [] if str(sample.kwargs.get("device")) == "cpu" else [sample]
            if len(drawn) == SAMPLES:
                break
    for sample in drawn:
        sample.input, sample.args, sample.kwargs = on_cpu((sample.input, tuple(sample.args), sample.kwargs))
    return drawn


def on_cpu(value: Any) -> Any:
    """Return arguments that name the CPU where they named MPS."""
    if isinstance(value, (str, torch.device)) and str(value).startswith("mps"):
        return "cpu"
    if isinstance(value, Mapping):
        return {name: on_cpu(item) for name, item in value.items()}
    return type(value)(on_cpu(item) for item in value) if type(value) in {list, tuple} else value


if __name__ == "__main__":
    sys.exit(main())
