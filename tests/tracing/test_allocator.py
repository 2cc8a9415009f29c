"""The rules of the CUDA caching allocator, one by one."""

from meshwright.tracing.allocator import MIB, Allocator


def test_small_requests_share_a_segment() -> None:
    allocator = Allocator()
    sizes = [allocator.allocate(size).size for size in (1, 513, MIB // 2)]
    assert sizes == [512, 1024, MIB // 2]
    assert allocator.reserved == 2 * MIB
    assert allocator.allocated == sum(sizes)


def test_middle_sized_requests_come_from_segments_of_20_mib() -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.allocate(5 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(5 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_large_request_has_a_segment_and_counts_whole_if_little_is_left() -> None:
    allocator = Allocator()
    assert allocator.allocate(10 * MIB + 512).size == 10 * MIB + 512  # almost 2 MiB are left: split off
    assert allocator.reserved == 12 * MIB
    assert allocator.allocate(11 * MIB + 512).size == 12 * MIB  # less than 1 MiB would be left


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(30 * MIB) is small
    assert allocator.reserved == 70 * MIB


def test_neighbours_become_one_again() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    for index in (0, 2, 1, 3):
        allocator.release(blocks[index])
    assert allocator.allocate(20 * MIB).size == 20 * MIB
    assert allocator.reserved == 20 * MIB


def test_streams_do_not_share() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(30 * MIB, stream=0))
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved == 60 * MIB


def test_a_full_device_gets_back_what_is_free_as_a_whole() -> None:
    allocator = Allocator(capacity=100 * MIB)
    free, divided = allocator.allocate(40 * MIB, stream=1), [allocator.allocate(20 * MIB) for _ in range(2)]
    allocator.release(free)
    assert allocator.allocate(60 * MIB).size == 60 * MIB
    assert (allocator.reserved, allocator.returns) == (100 * MIB, 1)
    for chunk in divided:
        allocator.release(chunk)
    assert allocator.allocate(20 * MIB).address == divided[0].address
    assert allocator.returns == 1


def test_what_is_partly_used_stays_and_may_be_lacking() -> None:
    allocator = Allocator(capacity=50 * MIB)
    chunks = [allocator.allocate(8 * MIB) for _ in range(4)]  # two segments of 20 MiB
    allocator.release(chunks[0])
    allocator.release(chunks[2])
    allocator.allocate(16 * MIB)
    assert (allocator.reserved, allocator.returns) == (56 * MIB, 1)
