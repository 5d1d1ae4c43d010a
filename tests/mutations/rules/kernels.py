"""Rules of kernels and of their launches. What the device code does shows on GPUs only."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

EXPIRED = "tests/kernels/test_expired_calls.py"
LAUNCH = "tests/jit/test_launch.py"
TURNS = "tests/jit/test_cache_turns.py"

LAUNCHES = (
    Mutation(
        name="first-use-in-a-capture",
        rule="the first use of a kernel inside a capture is left to the driver, which ends the capture",
        target="tokenloom.jit.kernel:_function",
        old="torch.cuda.is_current_stream_capturing()",
        new="False",
        tests=(f"{LAUNCH}::test_the_first_use_in_a_capture_is_refused",),
    ),
    Mutation(
        name="launch-on-the-current-device",
        rule="a launch fails while another device is current",
        target="tokenloom.jit.kernel:Kernel._launch_elsewhere",
        old="status in (results.CUDA_ERROR_INVALID_CONTEXT, results.CUDA_ERROR_INVALID_HANDLE)",
        new="False",
        tests=(f"{LAUNCH}::test_another_device_may_be_current",),
    ),
    Mutation(
        name="maps-of-other-strides",
        rule="a tensor map is found again for rows that lie further apart",
        target="tokenloom.jit.kernel:tensor_map",
        old="tensor.stride()",
        new="(256,)",
        tests=(f"{LAUNCH}::test_tensor_maps_are_found_again",),
    ),
)

COMPILED_ONCE = (
    Mutation(
        name="every-rank-compiles",
        rule="processes that want the same kernel all compile it",
        target="tokenloom.jit.cache:get",
        old="_turn(folder, key)",
        new="contextlib.nullcontext()",
        tests=(f"{TURNS}::test_each_kernel_is_compiled_once",),
    ),
)

EXPIRED_CALLS = (
    Mutation(
        name="old-rows-after-an-expired-combine",
        rule="a combine in which a wait expired leaves tokens as they were",
        target="kernels/combine/combine.cuh:combine",
        old="publish_nan<Shape>(args);",
        new="{}",
        tests=(f"{EXPIRED}::test_rows_that_never_come_home_make_everything_nan",),
        gpu=True,
    ),
    Mutation(
        name="summing-warps-keep-quiet",
        rule="a summing warp whose wait expired does not say so",
        target="kernels/combine/sum.cuh:sum_rows",
        old="if (!__all_sync(~0u, here)) return false;",
        new="if (!__all_sync(~0u, here)) return true;",
        tests=(f"{EXPIRED}::test_rows_that_never_come_home_make_everything_nan",),
        gpu=True,
    ),
    Mutation(
        name="sums-before-blocks-have-sent",
        rule="an eager combine adds rows that are not there yet",
        target="device/transport/call.cuh:wait_for_blocks",
        old="return __syncthreads_and(here);",
        new="return true;",
        tests=("tests/kernels/test_expired_in_turns.py::test_rows_that_never_come",),
        gpu=True,
    ),
    Mutation(
        name="sums-behind-the-first-block",
        rule="an eager combine waits for the first block of a peer only",
        target="device/transport/call.cuh:wait_for_blocks",
        old="turn.leaves_out(peer) ||",
        new="turn.leaves_out(peer) || block > 0 ||",
        tests=("tests/kernels/test_expired_in_turns.py::test_rows_that_never_come",),
        gpu=True,
    ),
    Mutation(
        name="counts-of-an-expired-dispatch",
        rule="a dispatch in which a wait expired leaves the counts of rows that are not there",
        target="kernels/dispatch/dispatch.cuh:dispatch",
        old="publish_nothing<Shape>(args);",
        new="{}",
        tests=(f"{EXPIRED}::test_rows_that_never_arrive_are_none",),
        gpu=True,
    ),
    Mutation(
        name="filling-warps-keep-quiet",
        rule="a filling warp whose wait expired does not say so",
        target="kernels/dispatch/dispatch.cuh:fill",
        old="const bool done = fill_further_places<Shape>(args, shared, epoch, warp, lane);",
        new="fill_further_places<Shape>(args, shared, epoch, warp, lane); const bool done = true;",
        tests=(f"{EXPIRED}::test_rows_that_never_arrive_are_none",),
        gpu=True,
    ),
    Mutation(
        name="one-deadline",
        rule="opening a call has the deadline of its phases",
        target="device/transport/call.cuh:opening_deadline_of",
        old="call.open_timeout_ns",
        new="call.timeout_ns",
        tests=(f"{EXPIRED}::test_a_rank_that_does_not_open_has_a_deadline_of_its_own",),
        gpu=True,
    ),
    Mutation(
        name="half-of-the-hash",
        rule="ranks compare half of the hash of their options",
        target="device/transport/call.cuh:await_call",
        old="word < kHeaderWords",
        new="word < kHeaderWords - 1",
        tests=(f"{EXPIRED}::test_a_call_that_is_refused",),
        gpu=True,
    ),
    Mutation(
        name="barrier-always-opened",
        rule="a barrier says that it opened when a rank did not come",
        target="kernels/barrier/barrier.cuh:barrier",
        old="*args.opened = opened == Opened::kGo",
        new="*args.opened = 1",
        tests=(f"{EXPIRED}::test_a_barrier_says_whether_it_opened",),
        gpu=True,
    ),
)

MUTATIONS = LAUNCHES + COMPILED_ONCE + EXPIRED_CALLS
