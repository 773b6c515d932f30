"""Errors of the simulated MPS device, with the texts of torch 2.13."""

import contextlib
import warnings

import numpy as np
import pytest
import torch

from helpers.simulated_tensors import ones
from openmed_nb.devices.environment import FALLBACK_VARIABLE
from openmed_nb.errors import ConfigurationError
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.operators import ALWAYS_ON_CPU, UNSUPPORTED

pytestmark = [
    pytest.mark.real_computer,  # Each test starts its own simulation.
    pytest.mark.filterwarnings("ignore:The operator"),
]
in_every_mode = pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])

FLOAT64 = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
    "Please use float32 instead."
)
COMPLEX128 = "Trying to convert ComplexDouble to the MPS backend but it does not have support for that dtype."
NUMPY = "can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
DEVICES = "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!"
CAPTURE = 'Failed to start capture of 0000-step.gputrace error Error Domain=MTLCaptureError Code=1 "Capture layer is not inserted."'
DROPOUT = "scaled_dot_product_attention for MPS does not support dropout."


def get_unsupported_text(name):
    """Return the error text for an unsupported operator."""
    return (
        f"The operator 'aten::{name}' is not currently implemented for the MPS device. If you want this op to be considered for "
        "addition please comment on https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that resulted "
        "in missing op as well as commit hash cf30153c4c131c8164ee7798e5022d810682e2cb. As a temporary fix, you can set "
        "the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op. WARNING: this "
        "will be slower than running natively on MPS."
    )


def attend(dropout=0.1, **options):
    """Run attention with arguments by name."""
    query = ones(1, 1, 4, 4, **options)
    return torch.nn.functional.scaled_dot_product_attention(query=query, key=query, value=query, dropout_p=dropout)


class Doubled(torch.autograd.Function):
    """Function with a float64 gradient."""

    @staticmethod
    def forward(_context, tensor):
        """Do nothing."""
        return tensor.clone()

    @staticmethod
    def backward(_context, gradient):
        """Make the gradient too precise."""
        return gradient.double()


def enter(block):
    """Enter and leave a context manager."""
    with block:
        pass


profiler = torch.mps.profiler
linalg = torch.linalg
sdpa = torch.nn.functional.scaled_dot_product_attention
LACKING = {
    "mode": lambda: torch.mode(ones(2)),
    "put_": lambda: ones(2).put_(torch.tensor([0], device="mps"), ones(1)),
    "_pdist_forward": lambda: torch.pdist(ones(3, 2, requires_grad=True)).sum().backward(),
    "_linalg_svd.U": lambda: linalg.svdvals(ones(2, 2)),
    "frexp.Tensor_out": lambda: torch.frexp(ones(2)),
    "linalg_lstsq.out": lambda: linalg.lstsq(ones(2, 2), ones(2, 2)),
}
# The class and the text of an error -> what raises it.
ERRORS = {
    (TypeError, FLOAT64): {
        "make float64": lambda: ones(2, dtype=torch.float64),
        "move float64": lambda: torch.ones(2, dtype=torch.float64).to("mps"),
        "move a model in float64": lambda: torch.nn.Linear(2, 2).double().to("mps"),
        "numpy's numbers": lambda: torch.tensor(np.ones(2), device="mps"),
        "a number of numpy": lambda: torch.as_tensor(np.float64(1), device="mps"),
        "double()": lambda: ones(2).double(),
        "to(float64)": lambda: ones(2).to(torch.float64),
        "sum in float64": lambda: ones(2).sum(dtype=torch.float64),
        "float64 in a backward pass": lambda: Doubled.apply(ones(2, requires_grad=True)).sum().backward(),
    },
    (TypeError, COMPLEX128): {"make complex128": lambda: ones(2, dtype=torch.complex128)},
    (TypeError, NUMPY): {
        "numpy()": lambda: ones(2).numpy(),
        "numpy() of a view": lambda: ones(2, 2)[0].detach().numpy(),
        "np.asarray": lambda: np.asarray(ones(2)),
    },
    (RuntimeError, DEVICES): {
        "a list of two devices": lambda: torch.cat([ones(2), torch.ones(2)]),
    },
    (RuntimeError, CAPTURE): {"a Metal capture": lambda: enter(profiler.metal_capture("step"))},
    (RuntimeError, "assigned grad has data located on a different device"): {
        "a gradient of another device": lambda: setattr(ones(2, requires_grad=True), "grad", torch.ones(2)),
    },
    (NotImplementedError, get_unsupported_text("_linalg_eigh.eigenvalues")): {
        "eigenvectors": lambda: linalg.eigh(ones(2, 2)),
        "in inference mode": lambda: torch.inference_mode()(linalg.eigh)(ones(2, 2)),
    },
    (NotImplementedError, get_unsupported_text("logspace.out")): {
        "logspace": lambda: torch.logspace(0, 1, 3, device="mps"),
        "logspace between tensors": lambda: torch.logspace(ones(1)[0], ones(1)[0], 3, device="mps"),
    },
    (NotImplementedError, DROPOUT): {
        "dropout by position": lambda: sdpa(*[ones(1, 1, 4, 4)] * 3, None, 0.1),
        "dropout without gradients": torch.no_grad()(attend),
        "dropout where nothing needs a gradient": attend,
    },
    **{(NotImplementedError, get_unsupported_text(name)): {name: attempt} for name, attempt in LACKING.items()},
}


def test_unsupported_calls_raise_errors_of_torch():
    for (kind, text), attempts in ERRORS.items():
        for name, attempt in attempts.items():
            with simulated_device(fallback=False), pytest.raises(kind) as caught:
                attempt()
            assert (str(caught.value), type(caught.value)) == (text, kind), name


ALLOWED = {
    "a float64 number of the CPU": lambda: ones(2) * torch.tensor(2.0, dtype=torch.float64),
    "an assignment": lambda: ones(3).__setitem__(torch.tensor([0, 2]), 5.0),
    "float64 that becomes float32 on the way": lambda: torch.ones(2, dtype=torch.float64).to("mps", torch.float32),
    "numpy's numbers as float32": lambda: torch.tensor(np.ones(2), dtype=torch.float32, device="mps"),
    "attention with dropout in training": lambda: attend(requires_grad=True),
    "singular vectors, which MPS sends to the CPU by itself": lambda: torch.linalg.svd(ones(2, 2)),
    "attention by name": lambda: attend(0.0),
    "complex64": lambda: ones(2, dtype=torch.complex64),
    "its numbers as a list": lambda: ones(2).tolist(),
    "one number": lambda: ones(2).sum().item(),
    "as numpy, by way of the CPU": lambda: ones(2).cpu().numpy(),
}


def test_supported_calls_are_accepted():
    for name, attempt in ALLOWED.items():
        with simulated_device(fallback=False):
            answer = attempt()
            assert not isinstance(answer, torch.Tensor) or answer.is_mps, name


class TestFallback:
    """Fallback of unsupported operators to the CPU."""

    def test_first_fallback_warns(self):
        with simulated_device(fallback=True) as mps, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            eigenvalues, _vectors = torch.linalg.eigh(ones(2, 2))
            for _ in range(2):
                torch.mode(ones(2))
        assert not eigenvalues.is_mps  # the simulation is over
        (warning,) = caught
        assert str(warning.message) == (
            "The operator 'aten::_linalg_eigh.eigenvalues' is not currently supported on the MPS backend and will fall "
            "back to run on the CPU. This may have performance implications."
        )
        assert (warning.category, warning.filename) == (UserWarning, __file__)
        assert mps.fallbacks == {"aten::_linalg_eigh.eigenvalues": 1, "aten::mode": 2}

    def test_every_fallback_warns_with_warn_always(self):
        torch.set_warn_always(True)
        try:
            with simulated_device(fallback=True), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    torch.mode(ones(2))
        finally:
            torch.set_warn_always(False)
        assert len(caught) == 3

    def test_fallback_result_is_on_device(self):
        with simulated_device(fallback=True):
            values, indices = torch.mode(ones(4, 4))
            assert values.is_mps
            assert indices.is_mps
            assert torch.mps.current_allocated_memory() == 256 * 2

    def test_fallback_variable_is_read_at_start(self):
        """Every value except exactly 0 enables the fallback."""
        for value, on in {None: False, "0": False, "1": True, "": True, "false": True, "00": True}.items():
            environ = {} if value is None else {FALLBACK_VARIABLE: value}
            with simulated_device(environ=environ) as mps:
                environ[FALLBACK_VARIABLE] = "0" if on else "1"
                with contextlib.nullcontext() if on else pytest.raises(NotImplementedError):
                    torch.mode(ones(2))
            assert mps.fallbacks == ({"aten::mode": 1} if on else {})

    @pytest.mark.parametrize("fallback", [True, False])
    @in_every_mode
    @pytest.mark.parametrize("decompose", [torch.linalg.svd, torch.svd, lambda matrix: torch.linalg.svd(A=matrix)])
    def test_singular_vectors_always_fall_back(self, decompose, mode, fallback):
        with simulated_device(fallback=fallback) as mps, mode():
            decompose(ones(2, 2, requires_grad=True))
        assert mps.fallbacks == {"aten::linalg_svd": 1}

    @in_every_mode
    @pytest.mark.parametrize(
        "compute",
        [
            torch.linalg.svdvals,
            torch.linalg.cond,
            lambda matrix: torch.linalg.matrix_norm(matrix, 2),
            lambda matrix: torch.svd(matrix, compute_uv=False),
        ],
    )
    def test_singular_values_fall_back_if_enabled(self, compute, mode):
        with simulated_device(fallback=True) as mps, mode():
            compute(ones(2, 2, requires_grad=True))
        assert mps.fallbacks == {"aten::_linalg_svd.U": 1}

    def test_unsupported_operator_works_on_cpu(self):
        with simulated_device(fallback=False) as mps:
            assert torch.mode(torch.ones(3)).values == 1
        assert not mps.fallbacks

    def test_unsupported_operators_exist_in_torch(self):
        for name in {*UNSUPPORTED, *ALWAYS_ON_CPU}:
            packet, _, overload = name.removeprefix("aten::").partition(".")
            assert hasattr(getattr(torch.ops.aten, packet, None), overload or "default"), name


def test_invalid_memory_is_rejected_before_start():
    with pytest.raises(ConfigurationError, match="is not a valid memory size"), simulated_device("lots"):
        pass
    assert not torch.backends.mps.is_available()


def test_profiler_matches_mac_without_capture():
    with simulated_device(environ={}):
        assert (profiler.is_metal_capture_enabled(), profiler.is_capturing_metal()) == (False, False)
        with profiler.profile(mode="interval", wait_until_completed=True):
            assert ones(2).sum() == 2
        for number in range(2):
            with pytest.raises(RuntimeError, match=f"capture of {number:04d}-one.gputrace"):
                enter(profiler.metal_capture("one"))
    assert not hasattr(torch._C, "_mps_isCaptureEnabled") or torch.backends.mps.is_available()
