"""``tokenloom plan``: its tables, its file, its chart, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tokenloom.backends.nodes.sizes import NodeSizes
from tokenloom.cli import app
from tokenloom.cli.terminal import MISUSED
from tokenloom.plan import Plan
from tokenloom.tune.network.constants import FITTED, with_rates, write_constants
from tokenloom.tune.network.cost import MIB

ROOT = Path(__file__).resolve().parents[2]


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(app.app, ["plan", *map(str, arguments)])


def rows_of(tmp_path: Path, *arguments: object) -> dict[str, dict[str, Any]]:
    done = plan(*arguments, "--json", tmp_path / "plan.json")
    assert (done.exit_code, done.stderr) == (0, "")
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    found = {row["name"]: row for row in rows}
    assert len(found) == len(rows), "names tell rows apart"
    return found


def test_a_plan_prints_its_tables_anywhere() -> None:
    """Nodes in detail beside published figures, then all sizes. It waits for no torch: nothing is measured."""
    program = (
        "import sys; from tokenloom.cli import app; sys.argv[1:] = ['plan', '--nodes', '4']\n"
        "try: app.main()\n"
        "finally: print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    env = dict(os.environ)  # without what readline, which pytest imports, puts into COLUMNS behind Python's back
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout
    assert shown.endswith("False\n")
    assert re.search(r"dispatch fp8 +node +2\.71 +2\.56 +55\.8 +17\.3 +3 +0\.0 +85\.8 +NIC +15\.9 +rows", shown)
    assert re.search(r"combine bf16 +route +6\.00 +11\.01 +239 .* 269 +NIC .* -", shown)
    assert re.search(r"fabric-lib +dispatch fp8 +route +154 +153 +1\.00 +yes", shown)
    assert "fabric-lib: perplexityai/pplx-garden:docs/fabric-lib.md" in re.sub(r"\s+", " ", shown)
    assert re.search(r"32 +2\.71 +5\.45 +6\.00 +85\.8 +142 +153 +154 +138 +247 +269 +266 +NIC +15\.9", shown)
    assert re.search(r"64 +4\.63 .* 3,216 .* 6,199 ", shown)
    assert re.search(r"2,048 +7\.87 .* 192\* +194\* +194\* +- ", shown)
    assert "* beyond the published figures in: ranks. They are of" in shown
    assert "…" not in shown, "nothing is cut off"


def test_stars_are_explained_where_there_are_some(tmp_path: Path) -> None:
    """By what lies beyond the published figures, whatever that is."""
    shown = re.sub(r"\s+", " ", plan("--hidden", 4096, "--tokens", 128).stdout)
    assert "* beyond the published figures in: ranks, hidden. They" in shown
    np.save(tmp_path / "routing.npy", np.zeros((16, 1, 8), dtype=np.int64) + np.arange(8))
    assert "*" not in plan("--routing", tmp_path / "routing.npy").stdout


def test_rows_of_all_sizes(tmp_path: Path) -> None:
    """8 to 2048 ranks, both operations, every protocol; marked beyond 256 ranks in low latency, and beyond 64 else."""
    found = rows_of(tmp_path)
    assert len(found) == 9 * 2 * 3 * 2
    ranks = [8 << power for power in range(9)]
    for tokens, regime, most in ((128, "low_latency", 256), (4096, "high_throughput", 64)):
        for row_per in ("node", "rank", "route"):
            for operation, dtype in (("dispatch", "fp8"), ("combine", "bf16")):
                for num_ranks in ranks:
                    row = found[f"{operation}/{row_per}/ep{num_ranks}/t{tokens}/h7168/k8/{dtype}"]
                    assert row["regime"] == regime
                    assert ("ranks" in row["extrapolated"]) == (not 16 <= num_ranks <= most)
                    assert (row["hop_us"] is not None) == (tokens == 128 and row_per == "node" and num_ranks > 8)
    row = found["dispatch/node/ep32/t128/h7168/k8/fp8"]
    assert row["published_us"] == {
        "fabric-lib": 153.9,
        "DeepEP V1, H800": 155,
        "fabric-lib, EFA": 229.1,
        "UCCL-EP, EFA": 465,
    }
    assert row["nic_bytes"] == pytest.approx(128 * 2.711 * 7392, rel=1e-3)
    assert row["time_us"] == pytest.approx(30 + row["nic_us"])


def test_nothing_is_cut_off_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 columns are less than the tables need: they are printed in parts, each with the columns that name a row."""
    narrow = Console(file=io.StringIO(), width=70)
    monkeypatch.setattr("tokenloom.cli.commands.plan.console", lambda: narrow)
    assert plan("--nodes", 4, "--budget", 2000).exit_code == 0
    assert isinstance(narrow.file, io.StringIO)
    shown = narrow.file.getvalue()
    assert "4096 tokens a rank on 4 nodes" in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 70
    assert len(re.findall(r"^ 2,048 ", shown, re.MULTILINE)) == 4, "two tables of all sizes, each in two parts"
    assert all(number in shown for number in ("10,433*", "10,439*", "43,286", "159.17"))


def test_nodes_are_planned_once(tmp_path: Path) -> None:
    """4 nodes are also in the table of all sizes; 6 are not, and take experts that no layer of 256 fills."""
    assert len(rows_of(tmp_path, "--nodes", 4, "--tokens", 128)) == 9 * 6
    found = rows_of(tmp_path, "--nodes", 6, "--tokens", 128)
    assert len(found) == 10 * 6
    assert found["combine/node/ep48/t128/h7168/k8/bf16"]["num_experts"] == 288
    assert "48 ranks: padded to 288 experts" in plan("--nodes", 6).stdout
    assert "128 tokens a rank on 1 node, 8 ranks" in plan("--nodes", 1).stdout


def test_options_are_used(tmp_path: Path) -> None:
    """Every size and rate reaches the model; other shapes have no published figures beside them."""
    sizes = ["--hidden", 4096, "--top-k", 6, "--num-experts", 64, "--ranks-per-node", 4, "--dtype", "bf16"]
    rates = ["--nic-gbytes-per-s", 20, "--nvlink-gbytes-per-s", 100, "--put-us", 0.5]
    found = rows_of(tmp_path, "--nodes", 4, "--tokens", "64,1024", "--node-limit", 1, *sizes, *rates)
    row = found["dispatch/node/ep16/t64/h4096/k6/bf16"]
    assert row["rows_per_token"] == pytest.approx(3 / 4), "one node, which is another in 3 of 4 cases"
    assert row["nic_us"] == pytest.approx(64 * 0.75 * 8192 / 20e3)
    assert row["nvlink_us"] == pytest.approx(row["nvlink_bytes"] / 100e3)
    assert row["puts_us"] == 0.5 * 3
    assert row["published_us"] == {}
    assert set(row["extrapolated"]) == {"rows", "tokens", "hidden", "top-k", "ranks a node"}
    assert found["dispatch/node/ep16/t1024/h4096/k6/bf16"]["regime"] == "high_throughput"
    assert max(each["num_ranks"] for each in found.values()) == 32
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["setup"]["constants"]["low_latency"]["nic_gbytes_per_s"] == 20
    assert content["notes"][1].startswith(
        "* beyond the published figures in: ranks, tokens, hidden, top-k, ranks a node. They are of hidden 7168"
    )
    assert content["notes"][-1] == "With more than 32 ranks, 1 node would hold fewer experts than a token chooses."


def test_constants_of_a_file_are_used(tmp_path: Path) -> None:
    write_constants(tmp_path / "constants.json", with_rates(FITTED, nic_gbytes_per_s=23.0))
    slow = rows_of(tmp_path, "--constants", tmp_path / "constants.json", "--tokens", 128)
    fast = rows_of(tmp_path, "--tokens", 128)
    name = "combine/node/ep64/t128/h7168/k8/bf16"
    assert slow[name]["nic_us"] == pytest.approx(2 * fast[name]["nic_us"])


def test_a_measured_routing_is_counted(tmp_path: Path) -> None:
    """All tokens of rank 0 of 2 x 2 choose node 1, the others stay at home: its NIC has four times the average."""
    ids = np.array([[[2, 3]] * 10, [[0, 1]] * 10, [[2, 3]] * 10, [[2, 3]] * 10])
    np.save(tmp_path / "routing.npy", ids)
    sizes = ["--ranks-per-node", 2, "--num-experts", 4, "--hidden", 256]
    found = rows_of(tmp_path, "--routing", tmp_path / "routing.npy", *sizes)
    assert len(found) == 12, "counted, and even"
    row = found["dispatch/node/ep4/t10/h256/k2/fp8/counted"]
    assert (row["nic_bytes"], row["rows_per_token"]) == (10 * 264, 0.25)
    assert row["imbalance"] == {"nic": 4.0, "rail": 2.0, "nvlink": 2.0}
    assert found["dispatch/rank/ep4/t10/h256/k2/fp8/counted"]["nic_bytes"] == 20 * 264
    assert found["dispatch/node/ep4/t10/h256/k2/fp8"]["imbalance"] is None
    shown = plan("--routing", tmp_path / "routing.npy", *sizes).stdout
    assert re.search(r"dispatch fp8 +node +0\.25 .* 4\.00  2\.00  2\.00", shown)
    assert "an even routing" in shown


def test_a_budget_that_is_exceeded_ends_the_command() -> None:
    """With the number, and with settings that fit."""
    done = plan("--nodes", 8, "--budget", 1000)
    assert (done.exit_code, done.stdout) == (MISUSED, "")
    assert "4096 tokens a rank on 8 nodes need 1,188.2 MiB" in done.stderr
    assert "the budget is 1,000.0 MiB; these fit: --tokens 3447, or --nodes 6, or --budget 1189" in done.stderr
    assert plan("--nodes", 8, "--budget", 1000, "--tokens", 3447).exit_code == 0


def test_memory_that_backends_hold() -> None:
    """In all, from the sizes that they make their memory by, and the most tokens that fit the budget."""
    shown = plan("--nodes", 2, "--tokens", 128, "--budget", 1000).stdout
    sizes = NodeSizes(Plan(16, 256, 7168, 8, 128), 2, "gin")
    row = re.search(r"gin +([\d,.]+) +([\d,.]+) +([\d,.]+) +([\d,]+)", shown)
    assert row is not None
    carried, own, total, most = (float(each.replace(",", "")) for each in row.groups())
    assert carried == pytest.approx(sizes.carried_bytes / MIB, abs=0.5)
    assert own == pytest.approx(sizes.node_bytes / MIB, abs=0.5)
    assert total == pytest.approx(sizes.total_bytes / MIB, abs=0.5)
    assert most > 128, "the tokens of the plan are no limit"

    def needed(tokens: int) -> int:
        return NodeSizes(Plan(16, 256, 7168, 8, tokens), 2, "gin").total_bytes

    assert needed(int(most)) <= 1000 * MIB < needed(int(most) + 1)
    assert "padded " in shown
    assert "max_tokens_per_rank" not in plan("--nodes", 1, "--tokens", 128, "--budget", 1000).stdout


def test_a_routing_of_half_a_node_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "routing.npy", np.zeros((12, 1, 8), dtype=np.int64))
    done = plan("--routing", tmp_path / "routing.npy")
    assert done.exit_code == MISUSED
    assert "the routing is of 12 ranks, expected a multiple of the 8 ranks of a node" in done.stderr


def test_the_chart_has_every_protocol_and_system(tmp_path: Path) -> None:
    """A curve for each protocol over all ranks, solid where figures exist, and their marks at the right places."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    with mock.patch.object(figures.Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure)):
        assert plan("--plot", tmp_path / "chart.png").exit_code == 0
    assert drawn[0].get_suptitle().endswith("8 ranks a node\nmodelled, dashed beyond the published ranks")
    axes = drawn[0].axes
    titles = [each.get_title() for each in axes]
    assert [title.partition(",")[0] for title in titles] == ["dispatch fp8", "combine bf16"] * 2
    dashed = [line for line in axes[0].lines if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [[8 << power for power in range(9)]] * 3
    by_label = {line.get_label(): line for line in axes[0].lines}
    assert list(by_label["a row per (token, node)"].get_xdata()) == [16, 32, 64, 128, 256]
    assert list(by_label["fabric-lib"].get_xydata().ravel()) == [16, 110.2, 32, 153.9, 64, 187.5]
    assert list({line.get_label(): line for line in axes[2].lines}["a row per route"].get_xdata()) == [16, 32, 64]


def test_the_chart_is_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib.figure")
    assert plan("--plot", tmp_path / "chart.png", "--hidden", 1024).exit_code == 0
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
