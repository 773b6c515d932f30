"""Memory of the simulated MPS device: allocation, cache, limits and watermarks."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.environment import HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE
from openmed_nb.devices.registry import is_out_of_memory
from openmed_nb.simulation.device import simulated_device
from openmed_nb.simulation.memory import OTHER_ALLOCATIONS, MacMemory, SimulatedAllocator, block_size

pytestmark = pytest.mark.real_computer  # Each test starts its own simulation.
on_mps = pytest.mark.usefixtures("mps")

GIB = 2**30
MIB = 2**20
KIB = 2**10
MAC = MacMemory(8 * GIB)


@pytest.fixture
def mps():
    """Simulated Mac with 1 GiB and without variables."""
    with simulated_device("1 GiB", environ={}) as device:
        yield device


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 3 * MIB)),
        st.tuples(st.just("free"), st.integers(0, 9)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=60,
)


@given(
    steps=STEPS,
    ratios=st.sampled_from(
        [{}, {HIGH_WATERMARK_VARIABLE: "0.0"}, {HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.5"}]
    ),
)
def test_allocator_invariants_hold(steps, ratios):
    allocator = SimulatedAllocator(MacMemory(24 * MIB), ratios)
    living: list[int] = []
    peak = 0
    for step, number in steps:
        before = allocator.allocated
        if step == "allocate":
            if before + OTHER_ALLOCATIONS + block_size(number) <= (allocator.limit or 24 * MIB):
                living.append(allocator.allocate(number))
            else:
                with pytest.raises(RuntimeError, match="MPS backend out of memory"):
                    allocator.allocate(number)
                assert allocator.allocated == before
        elif step == "free" and living:
            allocator.free(living.pop(number % len(living)))
        elif step == "empty":
            allocator.empty_cache()
            assert allocator.driver_allocated == allocator.allocated
        elif step == "reset":
            allocator.reset_peak()
            peak = 0
        peak = max(peak, sum(living))
        assert allocator.allocated == sum(living)
        assert allocator.driver_allocated >= allocator.allocated
        assert (
            allocator.driver_allocated + OTHER_ALLOCATIONS <= (allocator.limit or 24 * MIB)
            or allocator.driver_allocated == 0
        )
        assert allocator.peak == peak
        assert allocator.driver_peak >= max(peak, allocator.driver_allocated)


@given(steps=st.lists(st.tuples(st.sampled_from(["make", "view", "drop", "empty"]), st.integers(1, 4000)), max_size=30))
def test_allocated_counts_live_storages(steps):
    with simulated_device(environ={}) as mps:
        tensors: list[torch.Tensor] = []
        for step, number in steps:
            if step == "make":
                tensors.append(torch.zeros(number, device="mps"))
            elif step == "view" and tensors:
                tensors.append(tensors[number % len(tensors)][::2])
            elif step == "drop" and tensors:
                del tensors[number % len(tensors)]
            elif step == "empty":
                torch.mps.empty_cache()
                assert torch.mps.driver_allocated_memory() == torch.mps.current_allocated_memory()
            storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
            assert torch.mps.current_allocated_memory() == sum(map(block_size, storages.values()))
            assert torch.mps.driver_allocated_memory() >= torch.mps.current_allocated_memory()
        tensors.clear()
        assert mps.allocator.allocated == 0


@given(size=st.integers(1, 2**40))
def test_block_size_classes(size):
    block = block_size(size)
    assert size <= block <= max(size + 255, size * 9 // 8)
    assert block_size(block) == block


SMALL = {8: (5.33, 4), 16: (10.67, 8), 32: (21.33, 16)}
LARGE = {36: (27, 20.25), 48: (36, 27), 64: (48, 36), 96: (72, 54), 192: (144, 108)}


def test_memory_matches_reports_of_macs():
    for installed, reported in {**SMALL, **LARGE}.items():
        mac = MacMemory(installed * GIB)
        assert (mac.recommended / GIB, mac.largest_buffer / GIB) == pytest.approx(reported, abs=0.01), installed
        with simulated_device(f"{installed} GiB", environ={}):
            assert torch.mps.recommended_max_memory() == mac.recommended


def test_freed_block_is_cached_and_reused(mps):
    first = torch.zeros(MIB, device="mps")
    del first
    assert (torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()) == (0, 4 * MIB)
    second = torch.zeros(MIB - 9, device="mps")
    assert (torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()) == (4 * MIB, 4 * MIB)
    torch.mps.empty_cache()
    assert torch.mps.driver_allocated_memory() == 4 * MIB
    del second
    torch.mps.empty_cache()
    assert torch.mps.driver_allocated_memory() == 0
    assert mps.cache_clears == 2


@on_mps
def test_graph_memory_counts_while_loss_exists():
    weight = torch.ones(256, 256, device="mps", requires_grad=True)
    alone = torch.mps.current_allocated_memory()
    loss = ((weight * 2).exp() ** 2).sum()
    held = torch.mps.current_allocated_memory()
    assert held == alone + block_size(256 * 256 * 4) + block_size(4)
    losses = [loss]
    del loss
    gc.collect()
    assert torch.mps.current_allocated_memory() == held
    losses.pop().backward()
    assert torch.mps.current_allocated_memory() == alone + weight.grad.nbytes


@on_mps
def test_resized_tensor_counts_new_size():
    tensor = torch.zeros(64, device="mps")
    tensor.resize_(MIB)
    assert torch.mps.current_allocated_memory() == 4 * MIB


@on_mps
def test_peak_is_recorded_and_reset():
    tensor = torch.zeros(MIB, device="mps")
    del tensor
    assert torch.accelerator.memory_allocated() == 0
    assert torch.accelerator.max_memory_allocated() == 4 * MIB
    assert torch.accelerator.memory_reserved() == torch.accelerator.max_memory_reserved() == 4 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0
    free, total = torch.accelerator.get_memory_info()
    assert total - free == torch.mps.driver_allocated_memory()


LIMITS = {
    "as torch has it": ({}, "9.07 GiB"),
    "as openmed_nb sets it": ({HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"}, "5.33 GiB"),
    "no limit": ({HIGH_WATERMARK_VARIABLE: "0.0"}, None),
}


@pytest.mark.parametrize(("environ", "allowed"), LIMITS.values(), ids=LIMITS)
def test_out_of_memory_text_matches_recordings(environ, allowed):
    allocator = SimulatedAllocator(MAC, environ)
    count = ((allocator.limit or MAC.installed) - OTHER_ALLOCATIONS) // (512 * MIB)
    for _ in range(count):
        allocator.allocate(512 * MIB)
    with pytest.raises(RuntimeError, match="MPS backend out of memory") as caught:
        allocator.allocate(512 * MIB)
    limit = f", max allowed: {allowed}" if allowed else ""
    end = " Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause system failure)."
    assert str(caught.value) == (
        f"MPS backend out of memory (MPS allocated: {count * 0.5:.2f} GiB, other allocations: 384.00 KiB{limit}). "
        f"Tried to allocate 512.00 MiB on private pool.{end if allowed else ''}"
    )
    assert type(caught.value) is RuntimeError
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: "0.9"},
        {HIGH_WATERMARK_VARIABLE: "0"},
        {HIGH_WATERMARK_VARIABLE: "nan"},
        {HIGH_WATERMARK_VARIABLE: "-1"},
    ],
    ids=str,
)
def test_limit_does_not_initialize_allocator(environ):
    allocator = SimulatedAllocator(MAC, environ)
    limit = allocator.limit
    assert not allocator.initialized
    environ[LOW_WATERMARK_VARIABLE] = "0"
    if environ.get(HIGH_WATERMARK_VARIABLE) in {"nan", "-1"}:
        assert limit is None
    else:
        allocator.initialize()
        assert allocator.limit == limit


def test_low_watermark_empties_cache():
    for low, cached, block, driver in (("0.0", 4, 8, 12), ("0.5", 4, 8, 8), ("0.0", 10, 12, 12)):
        allocator = SimulatedAllocator(
            MacMemory(24 * MIB), {HIGH_WATERMARK_VARIABLE: "1.0", LOW_WATERMARK_VARIABLE: low}
        )
        allocator.free(allocator.allocate(cached * MIB))
        assert allocator.driver_allocated == cached * MIB
        allocator.allocate(block * MIB)
        assert allocator.driver_allocated == driver * MIB


@pytest.mark.parametrize("size", [MAC.largest_buffer + 1, 2**45])
def test_tensor_larger_than_buffer_is_rejected(size):
    with (
        simulated_device("8 GiB", environ={HIGH_WATERMARK_VARIABLE: "0.0"}),
        pytest.raises(RuntimeError, match=r"^Invalid buffer size: ") as caught,
    ):
        torch.randn(size // 4 + 1, device="mps")
    assert is_out_of_memory(caught.value)


def test_rejected_tensor_changes_nothing():
    with simulated_device("64 MiB", environ={}) as mps:
        weight = torch.ones(4 * MIB, device="mps", requires_grad=True)
        loss = (weight * 2).sum()
        before = mps.allocator.allocated
        torch.mps.set_per_process_memory_fraction(before / mps.allocator.memory.recommended)
        with pytest.raises(RuntimeError, match="MPS backend out of memory"):
            loss.backward()
        gc.collect()
        assert mps.allocator.allocated == before
        torch.mps.set_per_process_memory_fraction(2.0)
        assert torch.ones(MIB, device="mps").sum() == MIB


def test_fraction_applies_immediately(mps):
    assert torch.mps.recommended_max_memory() == GIB * 2 // 3
    keep = torch.zeros(25 * MIB, device="mps")
    torch.mps.set_per_process_memory_fraction(0.1)
    with pytest.raises(RuntimeError, match=r"max allowed: 68\.27 MiB"):
        torch.zeros(MIB, device="mps")
    torch.mps.set_per_process_memory_fraction(0.0)
    assert torch.zeros(MIB, device="mps").numel() + keep.numel() == 26 * MIB
    assert mps.allocator.limit is None
    with pytest.raises(TypeError, match="must be `float`"):
        torch.mps.set_per_process_memory_fraction(1)
    with pytest.raises(ValueError, match="Allowed range: 0~2"):
        torch.mps.set_per_process_memory_fraction(3.0)


TOUCHES = {
    "tensor": lambda: torch.zeros(2, device="mps"),
    "move": lambda: torch.nn.Linear(2, 2).to("mps"),
    "emptying": torch.mps.empty_cache,
    "allocated": torch.mps.current_allocated_memory,
    "driver": torch.mps.driver_allocated_memory,
    "recommended": torch.mps.recommended_max_memory,
    "fraction": lambda: torch.mps.set_per_process_memory_fraction(0.5),
    "peak": torch.accelerator.max_memory_allocated,
}
NO_TOUCHES = {
    "available": torch.backends.mps.is_available,
    "built": torch.backends.mps.is_built,
    "seed": lambda: torch.manual_seed(0),
    "synchronize": torch.mps.synchronize,
    "accelerator": torch.accelerator.current_accelerator,
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_invalid_watermarks_fail_on_every_use(touch):
    environ = {HIGH_WATERMARK_VARIABLE: "0.7"}
    with simulated_device(environ=environ) as mps:
        for question in NO_TOUCHES.values():
            question()
        assert not mps.allocator.initialized
        with pytest.raises(RuntimeError, match=r"^invalid low watermark ratio 1\.4$"):
            touch()
        environ.clear()  # The watermarks are read once.
        for again in TOUCHES.values():
            with pytest.raises(RuntimeError, match=r"^invalid low watermark ratio 1\.4$"):
                again()
