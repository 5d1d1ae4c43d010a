"""What a forked process inherits of its parent's communicators: it leaves them alone, and they work on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenloom as tl
from tests.support.cases import FP32, Case, make_comm, make_problem
from tests.support.on_ranks import on_ranks
from tests.support.patience import PATIENCE_S
from tokenloom.compat import deep_ep
from tokenloom.runtime.processes import RankContext

CASE = Case("forks", "", tokens=(5, 0, 3), top_k=2, hidden=16, dtype=FP32, to_quantise=False)
SIZES: dict[str, Any] = {"num_experts": 8, "hidden": 128, "intermediate": 128, "top_k": 2, "max_tokens_per_rank": 8}


def in_fork(what: Callable[[], str]) -> str:
    """What it returns in a forked process, or its error."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = what()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    killer = threading.Timer(PATIENCE_S, os.kill, (child, signal.SIGKILL))
    killer.start()
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    killer.cancel()
    return said


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except tl.TokenloomError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@on_ranks("four")
@pytest.mark.parametrize("masks", [False, True])
def test_a_communicator(context: RankContext, masks: bool) -> None:
    """Each call raises at once. It hung, and a parent aborted; closing it in the fork was heard by the other ranks."""
    problem = make_problem(CASE, context.num_ranks)
    x, ids, weights = problem.arguments(context)
    assert isinstance(x, torch.Tensor)
    x = x.nan_to_num(1, 1, 1)
    options: dict[str, Any] = {"timeout_s": PATIENCE_S} | ({"on_timeout": "mask"} if masks else {})
    with make_comm(context, "collective", problem.plan, **options) as comm:

        def there_and_back() -> torch.Tensor:
            routed = comm.dispatch(x, ids, weights)
            return comm.combine(routed.tokens, routed)

        want = there_and_back()
        leaf = torch.zeros_like(x).requires_grad_()
        before = comm.dispatch(leaf, ids, weights)
        pending = comm.send_dispatch(x, ids, weights)

        def use() -> str:
            calls: list[Callable[[], object]] = [
                lambda: comm.dispatch(x, ids, weights),
                lambda: comm.combine(before.tokens.detach(), before),
                before.tokens.sum().backward,
                pending.receive,
                comm.check,
                lambda: comm.mask_ranks([0]),
                lambda: make_comm(context, "collective", problem.plan),
            ]
            said = [told(call) for call in calls]
            comm.close()
            said.append(told(lambda: comm.dispatch(x, ids, weights)))
            return "\n".join(said)

        said = in_fork(use).splitlines()
        assert len(said) == 8
        assert all("was forked" in each for each in said), said
        pending.receive()
        assert torch.equal(there_and_back(), want)
        before.tokens.sum().backward()
        assert leaf.grad is not None


@on_ranks("four")
def test_layers_and_buffers(context: RankContext) -> None:
    """The same through whoever makes calls; the last one needs a communicator that the parent had not made."""
    group, device = context.group, context.device
    layer = tl.ExpertParallelMoE(group, **SIZES, device=device)
    mega = tl.MegaMoE(group, backend="composed", device=device, **SIZES)
    local = SIZES["num_experts"] // context.num_ranks
    mega.load_weights(torch.zeros(local, 256, 128), torch.zeros(local, 128, 128))
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, explicitly_destroy=True)
    x, ids = torch.zeros(3, 128), torch.zeros(3, 2, dtype=torch.int64)
    weights = torch.ones(3, 2)
    calls: list[Callable[[], object]] = [
        lambda: layer(x),
        lambda: mega(x.bfloat16(), ids, weights),
        lambda: buffer.dispatch(x.bfloat16(), ids, weights, num_experts=SIZES["num_experts"]),
        lambda: buffer.dispatch(x, ids, weights, num_experts=SIZES["num_experts"]),
    ]
    for call in calls[:-1]:
        call()

    def use() -> str:
        said = [told(call) for call in calls]
        layer.comm.close()
        mega.close()
        buffer.destroy()
        return "\n".join(said)

    said = in_fork(use).splitlines()
    assert len(said) == len(calls)
    assert all("was forked" in each for each in said), said
    for call in calls:
        call()
    layer.comm.close()
    mega.close()
    buffer.destroy()


@on_ranks("four")
def test_a_group_that_nobody_has_used(context: RankContext) -> None:
    """A communicator on it would wait in the fork for connections that are its parent's."""
    group = dist.new_group(list(range(context.num_ranks)))
    said = in_fork(
        lambda: told(lambda: tl.Communicator(group, num_experts=8, hidden=8, top_k=2, max_tokens_per_rank=4))
    )
    assert said.startswith("InvalidArgument: the process group was made by the process from which process"), said


def test_a_rank_alone() -> None:
    """It has no connections, so it works in both."""
    sizes: dict[str, Any] = {"num_experts": 2, "hidden": 8, "top_k": 1, "max_tokens_per_rank": 4}
    comm = tl.Communicator(**sizes, device="cpu")
    x, ids = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    assert in_fork(lambda: str(comm.dispatch(x, ids).num_rows)) == "4"
    comm.close()


SCRIPT = """
    import gc, os, sys
    import torch
    import torch.distributed as dist
    import tokenloom as tl

    class Inherits(torch.utils.data.Dataset):
        def __init__(self, comm):
            self.comm = comm

        def __len__(self):
            return 4

        def __getitem__(self, index):
            global comm
            comm = self.comm = None  # its last references in a worker
            gc.collect()
            return torch.full((3, 8), float(index))

    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    comm = tl.Communicator(num_experts=2, hidden=8, top_k=1, max_tokens_per_rank=4)
    for x in torch.utils.data.DataLoader(Inherits(comm), num_workers=2, batch_size=None):
        assert comm.dispatch(x, torch.zeros(3, 1, dtype=torch.int64)).num_rows == 3
    child = os.fork()
    if child == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    comm.check()
    comm.close()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_forks_that_never_call(tmp_path: Path) -> None:
    """Workers of a DataLoader inherit a communicator, and another fork ends as Python does: neither is noticed.

    gloo waited there, as Python ended, for threads that only the parent has.
    """
    given = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "store")]
    subprocess.run(given, check=True, timeout=3 * PATIENCE_S)
