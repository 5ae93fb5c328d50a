"""The simulated caching allocator keeps PyTorch's published rules."""

import random

import pytest

from fragscope.simulate.allocator import (
    GIB,
    MIB,
    Block,
    CachingAllocator,
    Device,
    ExpandableAllocator,
    OutOfMemoryError,
)


def allocator(total_bytes: int = GIB) -> CachingAllocator:
    return CachingAllocator(Device(total_bytes))


@pytest.mark.parametrize(
    ("wanted", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),
        (21 * MIB - 512, 21 * MIB - 512, 22 * MIB),
    ],
)
def test_a_size_decides_its_rounding_and_its_segment(wanted: int, allocated: int, reserved: int) -> None:
    torch = allocator()
    torch.alloc(wanted)
    assert torch.reserved_bytes == reserved
    # What remains of a large block is split off if it is more than 1 MiB.
    assert torch.allocated_bytes == allocated


def test_the_smallest_block_that_fits_is_taken() -> None:
    torch = allocator()
    large, small = torch.alloc(200 * MIB), torch.alloc(100 * MIB)
    torch.free(large)
    torch.free(small)
    assert torch.alloc(90 * MIB) is small
    assert torch.reserved_bytes == 300 * MIB


def test_neighbours_merge_inside_a_segment_and_never_across_two() -> None:
    torch = allocator()
    whole = torch.alloc(100 * MIB)
    torch.free(whole)
    parts = [torch.alloc(50 * MIB), torch.alloc(50 * MIB)]
    other = torch.alloc(100 * MIB)
    for block in (*parts, other):
        torch.free(block)
    assert torch.largest_free_bytes() == 100 * MIB
    assert torch.inactive_split_bytes() == 0


def test_a_live_tensor_pins_the_rest_of_its_segment() -> None:
    torch = allocator()
    torch.free(torch.alloc(100 * MIB))
    pin = torch.alloc(2 * MIB)
    assert torch.inactive_split_bytes() == 98 * MIB
    assert torch.empty_cache() == 0
    torch.free(pin)
    assert torch.empty_cache() == 100 * MIB


def test_when_the_card_is_full_whole_segments_go_back_and_it_is_tried_again() -> None:
    torch = allocator(300 * MIB)
    torch.free(torch.alloc(200 * MIB))
    torch.alloc(250 * MIB)
    assert (torch.retries_total, torch.ooms_total) == (1, 0)
    assert torch.reserved_bytes == 250 * MIB


def test_enough_memory_in_pieces_is_an_out_of_memory_error_that_says_so() -> None:
    holes: list[Block] = []
    torch = allocator(300 * MIB)
    blocks = [torch.alloc(90 * MIB) for _ in range(3)]
    for block in blocks:
        torch.free(block)
    for _ in range(3):
        holes.append(torch.alloc(40 * MIB))
        torch.alloc(50 * MIB)
    for block in holes:
        torch.free(block)
    with pytest.raises(OutOfMemoryError) as caught:
        torch.alloc(100 * MIB)
    oom = caught.value
    assert (oom.tried_bytes, oom.free_bytes, oom.stranded_bytes) == (100 * MIB, 30 * MIB, 120 * MIB)
    assert oom.free_bytes < oom.tried_bytes <= oom.free_bytes + oom.stranded_bytes
    assert (torch.retries_total, torch.ooms_total) == (1, 1)


def test_with_expandable_segments_nothing_is_split_off_and_only_exhaustion_fails() -> None:
    torch = ExpandableAllocator(Device(300 * MIB))
    blocks = [torch.alloc(40 * MIB) for _ in range(7)]
    for block in blocks[::2]:
        torch.free(block)
    torch.alloc(100 * MIB)
    assert torch.inactive_split_bytes() == 0
    with pytest.raises(OutOfMemoryError):
        torch.alloc(90 * MIB)


@pytest.mark.parametrize("seed", range(5))
def test_no_byte_is_lost_or_counted_twice(seed: int) -> None:
    rng = random.Random(seed)
    device = Device(4 * GIB)
    torch, live = CachingAllocator(device), list[Block]()
    for _ in range(3000):
        if live and rng.random() < 0.5:
            torch.free(live.pop(rng.randrange(len(live))))
        else:
            try:
                live.append(torch.alloc(int(2 ** rng.uniform(5, 28))))
            except OutOfMemoryError:
                torch.free(live.pop(rng.randrange(len(live))))
        assert torch.allocated_bytes == sum(block.size for block in live)
        assert torch.allocated_bytes <= torch.reserved_bytes == device.used_bytes <= device.total_bytes
        assert torch.inactive_split_bytes() <= torch.reserved_bytes - torch.allocated_bytes
    for block in live:
        torch.free(block)
    assert torch.inactive_split_bytes() == 0
    torch.empty_cache()
    assert device.used_bytes == torch.reserved_bytes == 0
