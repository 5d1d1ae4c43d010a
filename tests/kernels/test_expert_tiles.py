"""The tiles of a grouped GEMM: the host's compiler runs the tile source of the kernels, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tokenloom.jit import compiler
from tokenloom.kernels.gemm.launch import CLUSTER, TILE_COLUMNS, TILE_ROWS

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
template <int kN, class Bounds>
void print_tiles(const Bounds& bounds, unsigned clusters) {
    gridDim.x = clusters * kClusterBlocks;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (ExpertTiles<kN, Bounds> tiles(bounds); tiles.next(0);) {
            const Tile tile = tiles.tile(blockIdx.x % kClusterBlocks);
            std::printf("%u %d %d %d %d %d\\n", blockIdx.x, tile.expert, tile.row, tile.rows, tile.column,
                        int(tile.halves));
        }
    }
}

template <class Bounds>
int print_tiles(const Bounds& bounds, int n, unsigned clusters) {
    switch (n) {
WIDTH_CASES
    }
    return 1;
}

// clusters, N, and either S and counts or -1 and offsets.
int main(int argc, char** argv) {
    int numbers[kExperts + 1];
    for (int i = 4; i < argc; ++i) numbers[i - 4] = std::atoi(argv[i]);
    const int clusters = std::atoi(argv[1]), n = std::atoi(argv[2]), capacity = std::atoi(argv[3]);
    BoundsInSlots<kExperts> slots;
    BoundsByOffset<kExperts> rows;
    const int threads = 3;  // fewer than there are experts
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
        if (capacity >= 0) slots.fill(numbers, capacity, threads);
        else rows.fill(numbers, threads);
    }
    return capacity >= 0 ? print_tiles(slots, n, clusters) : print_tiles(rows, n, clusters);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if CXX is None:
        pytest.skip("no C++ compiler on this machine")
    cases = "\n".join(f"        case {n}: print_tiles<{n}>(bounds, clusters); return 0;" for n in WIDTHS)
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
    "empty experts first, between and last": ([0, 300, 0, 1, 0], 300),
    "one row": ([0, 0, 1, 0, 0], 1000),
    "all experts empty": ([0] * 5, 64),
    "no places": ([0] * 5, 0),
}
"""Rows of each expert, and places."""


def tiles_of(program: Path, clusters: int, n: int, *bounds: int) -> dict[int, list[tuple[int, ...]]]:
    """For each block, (expert, row, rows, column, halves) of its tiles in order."""
    done = subprocess.run([program, *map(str, (clusters, n, *bounds))], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[int, list[tuple[int, ...]]] = {block: [] for block in range(clusters * CLUSTER)}
    for line in done.stdout.splitlines():
        block, *tile = map(int, line.split())
        found[block].append(tuple(tile))
    return found


def check(program: Path, clusters: int, n: int, counts: list[int], begins: list[int], bounds: list[int]) -> None:
    found = tiles_of(program, clusters, n, *bounds)
    covered = set()
    for block, tiles in found.items():
        neighbour = found[block ^ 1]
        assert [tile[:3] for tile in tiles] == [tile[:3] for tile in neighbour], "both blocks take the same rows"
        for expert, row, rows, column, halves in tiles:
            assert 0 < rows <= TILE_ROWS
            assert begins[expert] <= row <= row + rows <= begins[expert] + counts[expert], "no rows but the expert's"
            assert halves == (counts[expert] <= TILE_ROWS // 2)
            assert column % TILE_COLUMNS == 0
            for each in range(row, row + rows):
                assert (expert, each, column) not in covered, "twice"
                covered.add((expert, each, column))
    columns = range(0, -(-n // (CLUSTER * TILE_COLUMNS)) * CLUSTER * TILE_COLUMNS, TILE_COLUMNS)
    rows_of = {expert: range(begins[expert], begins[expert] + counts[expert]) for expert in range(NUM_EXPERTS)}
    assert covered == {(e, row, column) for e, rows in rows_of.items() for row in rows for column in columns}


@pytest.mark.parametrize(("clusters", "n"), LAUNCHES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_tiles_cover_each_row_once(program: Path, name: str, clusters: int, n: int) -> None:
    """In slots and behind offsets: all rows of all experts, no others. An expert without rows has no tile, and weights
    are loaded for tiles only, so nobody reads its weights."""
    counts, capacity = ROUTINGS[name]
    everyone = range(NUM_EXPERTS)
    check(program, clusters, n, counts, [e * capacity for e in everyone], [capacity, *counts])
    offsets = [7 + sum(counts[:e]) for e in range(NUM_EXPERTS + 1)]
    check(program, clusters, n, counts, offsets, [-1, *offsets])


def test_a_count_above_the_places_stands_for_all_of_them(program: Path) -> None:
    """Otherwise rows of the next expert would be written twice, and memory behind the last one's places."""
    counts, capacity = [100, 64, 0, 100, 100], 100
    begins = [e * capacity for e in range(NUM_EXPERTS)]
    check(program, 3, 256, counts, begins, [capacity, 101, 64, 0, 1 << 30, 4096])
