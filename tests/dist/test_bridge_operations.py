"""Operations of the bridge on unlike islands: right numbers, few bytes, names in errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetrun import bridge
from hetrun.bridge.plan import SMALL_BYTES, link_bound
from hetrun.model import MIB
from tests.dist.bridge_matrix import (
    FLOATS,
    FOLDS,
    Matrix,
    allowed,
    gather_single,
    scatter_single,
)
from tests.dist.bridges import num_threads, on_islands

pytestmark = pytest.mark.dist

SHAPES = ("aabb", "aaab", "abbb", "abc", "aabcc", "abab")
SMALL, LARGE = (
    1000,
    30_011,
)  # elements: on either side of SMALL_BYTES for all dtypes of two bytes and more
CHUNKS = 700_003  # elements of fp32: several chunks and an odd end


def quick(rank: int, islands: str) -> tuple[int, list[str], str]:
    """About a hundred operations: each on both sides of SMALL_BYTES, each dtype once, several chunks once."""
    matrix = Matrix(None, range(len(islands)))
    last = len(islands) - 1
    for count in (0, SMALL, LARGE):
        run(matrix, sizes=(count,), dtypes=(torch.float32,), folds=("SUM",))
        for fold in ("AVG", "MAX", "PRODUCT"):
            matrix.all_reduce(count, torch.float32, fold)
    for dtype, fold in (
        (torch.int64, "BAND"),
        (torch.int32, "BOR"),
        (torch.uint8, "BXOR"),
        (torch.float64, "MIN"),
    ):
        matrix.all_reduce(LARGE, dtype, fold)
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.int16,
        torch.int8,
        torch.bool,
        torch.complex64,
    ):
        matrix.all_reduce(LARGE, dtype, "SUM")
    matrix.reduce_scatter(LARGE, torch.bfloat16, "AVG", as_list=True)
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.complex64):
        matrix.broadcast(LARGE, dtype, 1)
        matrix.all_gather(LARGE, dtype)
    matrix.all_reduce(CHUNKS, torch.float32, "SUM")
    matrix.reduce_scatter(CHUNKS // 4, torch.float32, "SUM", as_list=False)
    matrix.broadcast(CHUNKS, torch.float32, last)
    matrix.reduce(CHUNKS, torch.float32, "SUM", 1)
    matrix.all_gather(CHUNKS // 3, torch.float32)
    matrix.receive_from_any(3)
    matrix.receive_from_any(LARGE)
    for count in (5, LARGE // 6):
        matrix.layouts(count)
    matrix.objects()
    return matrix.num_checks, matrix.wrong, matrix.bits.hexdigest()


def run(
    matrix: Matrix, *, sizes: Sequence[int], dtypes: Sequence[torch.dtype], folds: Sequence[str]
) -> None:
    for count in sizes:
        for dtype in dtypes:
            for number, fold in enumerate(name for name in folds if allowed(name, dtype)):
                matrix.all_reduce(count, dtype, fold)
                matrix.reduce_scatter(count, dtype, fold, as_list=number % 2 == 0)
                matrix.reduce(count, dtype, fold, number % matrix.size)
            for root in {0, matrix.size - 1}:
                matrix.broadcast(count, dtype, root)
            matrix.gather_and_scatter(count, dtype, count % matrix.size)
            matrix.all_gather(count, dtype)
            matrix.all_to_all(count, dtype)
            matrix.send_and_receive(count, dtype)


@pytest.mark.parametrize("islands", SHAPES)
def test_all_operations_equal_one_process_in_fp64(islands: str, tmp_path: Path) -> None:
    answers = on_islands(quick, islands, tmp_path)
    assert [wrong for _, wrong, _ in answers] == [[]] * len(islands)
    assert all(num_checks > 70 for num_checks, _, _ in answers)
    assert len({bits for _, _, bits in answers}) == 1


def subgroups(rank: int, islands: str) -> tuple[int, list[str]]:
    """Groups across, inside an island, with parts of islands, in another order than ranks, all at once."""
    members = [[0, 1], [3, 0, 2], [1, 4], [2, 3, 4], [4, 3, 2, 1, 0], [1, 2]]
    groups = [(ranks, dist.new_group(ranks, sort_ranks=False)) for ranks in members]
    checks = 0
    wrong: list[str] = []
    for ranks, group in [item for item in groups if rank in item[0]]:
        matrix = Matrix(group, ranks)
        if matrix.is_bridge:
            run(matrix, sizes=(LARGE,), dtypes=(torch.float32,), folds=("SUM",))
        matrix.all_reduce(LARGE, torch.float32, "MAX")
        checks, wrong = checks + matrix.num_checks, wrong + matrix.wrong
    return checks, wrong


def test_subgroups_of_any_kind_work_beside_each_other(tmp_path: Path) -> None:
    answers = on_islands(subgroups, "aabbb", tmp_path)
    assert [wrong for _, wrong in answers] == [[]] * 5
    assert all(checks > 20 for checks, _ in answers)


def disorder(rank: int, islands: str) -> list[float]:
    """Three groups of the same ranks, used in another order on every rank, from two threads, waited for in reverse."""
    groups = [dist.new_group(list(range(len(islands)))) for _ in range(3)]
    turned = groups[rank % 3 :] + groups[: rank % 3]
    tensors = {group: [torch.full((LARGE * 10,), 1.0) for _ in range(6)] for group in groups}

    def use(mine: Sequence[dist.ProcessGroup], part: slice) -> None:
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for group in mine
            for tensor in tensors[group][part]
        ]
        for work in works[::-1]:
            work.wait()

    for part in (slice(0, 3), slice(3, 6)):
        halves = [threading.Thread(target=use, args=(turned[:1], part))]
        halves += [threading.Thread(target=use, args=(turned[1:], part))]
        for half in halves:
            half.start()
        for half in halves:
            half.join()
    return [float(tensor.min()) for group in groups for tensor in tensors[group]]


def test_groups_used_in_any_order_by_any_thread_do_not_wait_for_each_other(tmp_path: Path) -> None:
    assert on_islands(disorder, "aabb", tmp_path) == [[4.0] * 18] * 4


def threads(rank: int, islands: str) -> int:
    for number in range(12):
        group = dist.new_group([0, 2, 3] if number % 2 else [0, 1, 2, 3])
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.ones(LARGE)
            dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
    return num_threads() - 1


def test_at_most_eight_threads_whatever_the_number_of_groups(tmp_path: Path) -> None:
    assert max(on_islands(threads, "aabb", tmp_path)) <= 8


def crossing(rank: int, islands: str, kind: str, num_bytes: int) -> tuple[int, int]:
    """Bytes that this rank sent to other islands and got from them in one operation."""
    size = len(islands)
    count = num_bytes // 4
    whole, part = torch.ones(count), torch.ones(count // size)

    def act() -> None:
        if kind == "all_reduce":
            dist.all_reduce(whole)
        elif kind == "all_gather":
            gather_single(whole, part)
        else:
            scatter_single(part, whole)

    def counted() -> tuple[int, int]:
        dist.barrier()
        others = [other for other in range(size) if islands[other] != islands[rank]]
        now = bridge.traffic()
        return sum(now[other][0] for other in others), sum(now[other][1] for other in others)

    before = counted()
    act()
    after = counted()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("islands", ["aabb", "aaab", "aabcc"])
def test_bytes_over_the_links_are_those_that_must_cross(
    kind: str, islands: str, tmp_path: Path
) -> None:
    num_bytes = len(islands) * 2 * MIB
    answers = on_islands(crossing, islands, tmp_path, kind, num_bytes)
    sizes = [islands.count(letter) for letter in sorted(set(islands))]
    for number, letter in enumerate(sorted(set(islands))):
        bound = link_bound(kind, num_bytes, sizes, island=number)
        for direction in range(2):
            moved = sum(
                answer[direction]
                for answer, own in zip(answers, islands, strict=True)
                if own == letter
            )
            assert bound[direction] <= moved <= 1.02 * bound[direction]


def inside(rank: int, islands: str) -> tuple[str, int]:
    dist.all_reduce(torch.ones(LARGE))
    return type(dist.group.WORLD).__name__, num_threads()


def test_world_of_one_island_is_the_library_itself(tmp_path: Path) -> None:
    assert [name for name, _ in on_islands(inside, "aa", tmp_path)] == ["ProcessGroup"] * 2


def full(rank: int, islands: str, dtype_name: str) -> tuple[int, list[str]]:
    matrix = Matrix(None, range(len(islands)))
    dtype = getattr(torch, dtype_name)
    lane = SMALL_BYTES // dtype.itemsize
    run(
        matrix,
        sizes=(0, 1, 3, 17, lane - 1, lane, lane + 1, 4 * lane, MIB // dtype.itemsize + 1),
        dtypes=(dtype,),
        folds=FOLDS,
    )
    return matrix.num_checks, matrix.wrong


@pytest.mark.bench
@pytest.mark.parametrize(
    "dtype", [str(dtype).removeprefix("torch.") for dtype in (*FLOATS, torch.int64, torch.uint8)]
)
@pytest.mark.parametrize("islands", [*SHAPES, "abcde", "aaaab"])
def test_full_matrix(islands: str, dtype: str, tmp_path: Path) -> None:
    for num_checks, wrong in on_islands(full, islands, tmp_path, dtype):
        assert wrong == []
        assert num_checks > 200
