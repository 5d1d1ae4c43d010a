"""The tiles of a grouped GEMM: the host's compiler runs the tile source of the kernels, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenloom.jit import compiler
from tokenloom.kernels.gemm.launch import CLUSTER, LEAST_STEP, TILE_COLUMNS, TILE_HEIGHTS, tile_rows_for

CXX = shutil.which("c++") or shutil.which("g++")
NUM_EXPERTS = 5
WIDTHS = (128, 256, 640, 1024)
"""N: below a tile, one tile, an odd number of strips, two pairs of them."""
LAUNCHES = ((1, 128), (3, 256), (66, 640), (1, 640), (3, 1024))
"""Clusters and N: as few clusters as there can be, and more than there are tiles."""

SOURCE = """
#include <cstdio>
#include <cstdlib>

#define __device__
#define __forceinline__ inline
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
static int min(int a, int b) { return a < b ? a : b; }

#include "device/roles/expert_tiles.cuh"

constexpr int kExperts = NUM_EXPERTS;

// As all roles of all blocks see them.
template <class Cut, class Bounds>
void print_tiles(const Bounds& bounds, unsigned clusters) {
    gridDim.x = clusters * kClusterBlocks;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (ExpertTiles<Cut, Bounds> tiles(bounds); tiles.next(0);) {
            const Tile tile = tiles.tile(blockIdx.x % kClusterBlocks);
            std::printf("%u %d %d %d %d %d\\n", blockIdx.x, tile.expert, tile.row, tile.rows, tile.column,
                        int(tile.halves));
        }
    }
}

template <int kN>
using Even64 = EvenCut<kN, 64>;
template <int kN>
using Even128 = EvenCut<kN, 128>;
template <int kN>
using Even160 = EvenCut<kN, 160>;
template <int kN>
using Even256 = EvenCut<kN>;

template <template <int> class Cut, class Bounds>
int print_tiles_of(const Bounds& bounds, int n, unsigned clusters) {
    switch (n) {
WIDTH_CASES
    }
    return 1;
}

template <class Bounds>
int print_tiles(const Bounds& bounds, int n, unsigned clusters, int rows_by_row) {
    switch (rows_by_row) {
        case 64: return print_tiles_of<Even64>(bounds, n, clusters);
        case 128: return print_tiles_of<Even128>(bounds, n, clusters);
        case 160: return print_tiles_of<Even160>(bounds, n, clusters);
        case 256: return print_tiles_of<Even256>(bounds, n, clusters);
        default: return print_tiles_of<FixedCut>(bounds, n, clusters);
    }
}

// Rows of a tile of recipe "row", or 0; clusters, N, and either S and counts or -1 and offsets.
int main(int argc, char** argv) {
    int numbers[kExperts + 1];
    for (int i = 5; i < argc; ++i) numbers[i - 5] = std::atoi(argv[i]);
    const int by_row = std::atoi(argv[1]);
    const int clusters = std::atoi(argv[2]), n = std::atoi(argv[3]), capacity = std::atoi(argv[4]);
    BoundsInSlots<kExperts> slots;
    BoundsByOffset<kExperts> rows;
    const int threads = 3;  // fewer than there are experts
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
        if (capacity >= 0) slots.fill(numbers, capacity, threads);
        else rows.fill(numbers, threads);
    }
    return capacity >= 0 ? print_tiles(slots, n, clusters, by_row) : print_tiles(rows, n, clusters, by_row);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CXX is None:
        pytest.skip("no C++ compiler on this machine")
    cases = "\n".join(f"        case {n}: print_tiles<Cut<{n}>>(bounds, clusters); return 0;" for n in WIDTHS)
    folder = tmp_path_factory.mktemp("tiles")
    text = SOURCE.replace("NUM_EXPERTS", str(NUM_EXPERTS)).replace("WIDTH_CASES", cases)
    (folder / "tiles.cpp").write_text(text)
    command = [CXX, "-std=c++17", "-O1", "-I", str(compiler.PACKAGE), "-o", "tiles", "tiles.cpp"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "tiles"


ROUTINGS = {
    "full experts": ([200] * 5, 200),
    "full experts, whole tiles": ([256] * 5, 256),
    "around tiles and halves": ([63, 64, 65, 128, 129], 300),
    "around tiles that share": ([257, 384, 385, 512, 513], 600),
    "many tiles": ([1000, 2311, 0, 768, 905], 2400),
    "empty experts first, between and last": ([0, 300, 0, 1, 0], 300),
    "one row": ([0, 0, 1, 0, 0], 1000),
    "all experts empty": ([0] * 5, 64),
    "no places": ([0] * 5, 0),
}
"""Rows of each expert, and places."""


def tiles_of(program: Path, rows_by_row: int, clusters: int, n: int, *bounds: int) -> dict[int, list[tuple[int, ...]]]:
    """For each block, (expert, row, rows, column, halves) of its tiles in order."""
    done = subprocess.run(
        [program, *map(str, (rows_by_row, clusters, n, *bounds))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[int, list[tuple[int, ...]]] = {block: [] for block in range(clusters * CLUSTER)}
    for line in done.stdout.splitlines():
        block, *tile = map(int, line.split())
        found[block].append(tuple(tile))
    return found


def check(
    program: Path, rows_by_row: int, clusters: int, n: int, counts: list[int], begins: list[int], bounds: list[int]
) -> None:
    found = tiles_of(program, rows_by_row, clusters, n, *bounds)
    of_tile, places = TILE_COLUMNS["row" if rows_by_row else "block"], dict[int, tuple[int, int]]()
    most_rows = rows_by_row or TILE_HEIGHTS["block"][0]
    covered = set()
    for block, tiles in found.items():
        neighbour = found[block ^ 1]
        assert [tile[:3] for tile in tiles] == [tile[:3] for tile in neighbour], "both blocks take the same rows"
        for expert, row, rows, column, halves in tiles:
            assert 0 < rows <= most_rows
            assert places.setdefault(row // LEAST_STEP + expert, (expert, row)) == (expert, row), "two tiles' place"
            if rows_by_row and counts[expert] > most_rows:
                assert rows > most_rows // 2 - 16, "weights are loaded for few rows"
            assert begins[expert] <= row <= row + rows <= begins[expert] + counts[expert], "no rows but the expert's"
            assert halves == (not rows_by_row and counts[expert] <= most_rows // 2)
            assert column % of_tile == 0
            for each in range(row, row + rows):
                assert (expert, each, column) not in covered, "twice"
                covered.add((expert, each, column))
    columns = range(0, -(-n // (CLUSTER * of_tile)) * CLUSTER * of_tile, of_tile)
    rows_of = {expert: range(begins[expert], begins[expert] + counts[expert]) for expert in range(NUM_EXPERTS)}
    assert covered == {(e, row, column) for e, rows in rows_of.items() for row in rows for column in columns}


@pytest.mark.parametrize("rows_by_row", [0, 64, 128, 160, 256])
@pytest.mark.parametrize(("clusters", "n"), LAUNCHES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_tiles_cover_each_row_once(program: Path, name: str, clusters: int, n: int, rows_by_row: int) -> None:
    """In slots and behind offsets: all rows of all experts, no others. An expert without rows has no tile, and weights
    are loaded for tiles only, so nobody reads its weights."""
    counts, capacity = ROUTINGS[name]
    everyone = range(NUM_EXPERTS)
    check(program, rows_by_row, clusters, n, counts, [e * capacity for e in everyone], [capacity, *counts])
    offsets = [7 + sum(counts[:e]) for e in range(NUM_EXPERTS + 1)]
    check(program, rows_by_row, clusters, n, counts, offsets, [-1, *offsets])


def test_a_count_above_the_places_stands_for_all_of_them(program: Path) -> None:
    """Otherwise rows of the next expert would be written twice, and memory behind the last one's places."""
    counts, capacity = [100, 64, 0, 100, 100], 100
    begins = [e * capacity for e in range(NUM_EXPERTS)]
    check(program, 0, 3, 256, counts, begins, [capacity, 101, 64, 0, 1 << 30, 4096])


def test_tiles_of_a_number_of_rows() -> None:
    """As many as most experts have, where there is such a height."""
    averages = (0, 0.25, 53, 54, 112, 113, 128, 142, 143, 256, 300, 2048)
    found = [tile_rows_for(rows, "row", four_bits=False) for rows in averages]
    assert found == [128] * 5 + [160] * 3 + [256] * 4, found
    of_four_bits = [tile_rows_for(rows, "row", four_bits=True) for rows in averages]
    assert of_four_bits == [64] * 3 + found[3:], of_four_bits
    assert {tile_rows_for(rows, "block", four_bits=False) for rows in averages} == {128}
