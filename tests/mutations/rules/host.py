"""Rules of the host's side of calls: what ranks compare, what is kept and let go, what kernels report, processes."""

from __future__ import annotations

from tests.mutations.mutation import M

# fmt: off
HANDSHAKE = "tests/backends/test_handshake.py::test_every_field_counts"
PREPARED = "tests/backends/test_nvlink_prepared.py::test_"
HANDLE = "tests/backends/test_nvlink_handle.py::test_"

CALLS = (
    M("gradients-of-inputs-are-not-compared", "ranks do not compare whether a gradient is wanted",
      "backends.handshake:dispatch_fields", "kind.x_needs_grad", "None", HANDSHAKE),
    M("dtypes-of-results-are-not-compared", "ranks do not compare the dtype of a combine's result",
      "backends.handshake:combine_fields", "name not in ('needs_grad', 'strategy')",
      "name not in ('needs_grad', 'strategy', 'out_dtype')", HANDSHAKE),
    M("words-of-the-first-call", "kernels of a prepared kind leave their words where the first call had them",
      "backends.peers.prepared:PeerDispatch.set_arguments", "base + all_counts",
      "vars(self).setdefault('base', base) + all_counts", f"{PREPARED}each_dispatch_tells_its_own_tensors"),
    M("ids-that-were-changed-since", "routes go by ids that were changed in place since their dispatch",
      "backends.peers.handle:PeerHandle.__init__", "None if given_ids.is_inference() else given_ids._version",
      "None", f"{HANDLE}ids_changed_in_place"),
    M("changes-of-other-ids", "changes of ids that were replaced count for those that replaced them",
      "backends.peers.handle:PeerHandle.use_ids", "self.ids_version = version_of(self.given_ids)", "pass",
      f"{HANDLE}ids_that_were_replaced"),
    M("gradients-that-may-not-change", "a gradient that is sent changes with the tensor that it was given as",
      "backends.collective:CollectiveBackend.send_weight_gradients", "grad.clone()", "grad",
      "tests/comm/test_halves.py::test_transfers_that_begin_late"),
    M("kinds-are-checked-again", "a kind of dispatch that was checked is checked again at every call",
      "comm.calls:Kinds.check_dispatch",
      "self._dispatches[arguments, mode, x.dtype, topk_ids.dtype, weights_dtype, scales is None] = known", "pass",
      "tests/backends/test_nvlink_kinds.py::test_the_second_call_of_a_kind_is_right_at_a_glance"),
    M("counts-on-the-callers-device", "counts of a call lie on the caller's default device",
      "backends.handshake:handshake", "torch.zeros(num_counts, dtype=torch.int64, device='cpu')",
      "torch.zeros(num_counts, dtype=torch.int64)", "tests/comm/test_defaults.py::test_communicator"),
    M("fp8-again-in-slots", "FP8 rows go again to slots, whose scales have another layout",
      "comm.checks:rows_again", "options.layout == 'slots'", "False",
      "tests/comm/test_if_needed.py::test_fp8_again"),
)

REPORTS, DEFERRED = "tests/runtime/test_kernel_reports.py::test_", "tests/runtime/test_deferred_release.py::test_"
GRAPHS = "tests/runtime/test_graph_references.py::test_"
RECORDS = "runtime.kernel_reports:CallRecords"
RELEASE = "runtime.deferred_release:release_dropped"

KEPT = (
    M("outcomes-are-read-again", "what a call has found is found again in the next call of its slot",
      f"{RECORDS}.take", "self._words[word] = 0", "pass", f"{REPORTS}records_are_read_once"),
    M("over-before-it-ends", "a call counts as over when an earlier one of its slot has ended", f"{RECORDS}.is_over",
      "self._words[RECORD_WORDS * slot + SEQUENCE_WORD] != sequence",
      "self._words[RECORD_WORDS * slot + SEQUENCE_WORD] == 0", f"{REPORTS}a_call_is_over_when_its_number_is_there"),
    M("counts-of-another-call", "counts that an earlier call has left are taken for those of this one",
      "runtime.kernel_reports:HostCounts.are_there", "self._words[0] == self.sequence", "self._words[0] != 0",
      f"{REPORTS}counts_belong_to_a_sequence_number"),
    M("contents-before-their-word", "a host whose loads change places reads what lay there before",
      f"{RECORDS}.is_well", "not _LOADS_KEEP_ORDER", "False",
      f"{REPORTS}reads_are_ordered_where_the_machine_does_not"),
    M("undone-once-or-never", "what cannot be undone now is forgotten", RELEASE, "not done", "False",
      f"{DEFERRED}what_is_not_done_is_tried_again"),
    M("undone-in-a-capture", "memory is given back while a graph is captured", RELEASE,
      "not _waiting or captured or not _at_work.acquire(blocking=False)",
      "not _waiting or not _at_work.acquire(blocking=False)", f"{DEFERRED}not_during_a_capture"),
    M("undone-in-a-child", "a forked process undoes what is its parent's", RELEASE, "process != os.getpid()", "False",
      f"{DEFERRED}a_child_undoes_nothing_of_its_parent"),
    M("the-first-graph-counts", "memory is given back when the first of several graphs is gone",
      "runtime.graph_references:GraphReferences.are_gone", "posted.value >= self._num_held", "posted.value >= 1",
      f"{GRAPHS}the_last_of_several_graphs_counts"),
    M("calls-count-as-graphs", "a graph with several calls counts several times, and is never gone",
      "runtime.graph_references:GraphReferences.hold", "int(capture) in self._captures", "False",
      f"{GRAPHS}a_graph_with_many_calls_counts_once"),
    M("handles-hide-their-tensors", "memory of a handle is used anew while another stream reads it",
      "runtime.streams:tensors_in",
      "hasattr(type(value), '__dataclass_fields__') or hasattr(type(value), 'holds_tensors')",
      "hasattr(type(value), '__dataclass_fields__')", "tests/comm/test_streams.py::test_all_of_a_handle_is_found"),
)

IDENTITY, POOL = "tests/runtime/test_process_identity.py::test_", "tests/runtime/test_processes.py::test_"

PROCESSES = (
    M("pids-are-given-again", "a process that has the number of one that has ended is taken for it",
      "runtime.process_identity:ProcessIdentity.has_ended", "started != self.started or (state in 'ZX' and alone)",
      "state in 'ZX' and alone", f"{IDENTITY}a_pid_that_was_given_again"),
    M("pids-of-other-hosts", "a process of another host has ended if its number is free here",
      "runtime.process_identity:ProcessIdentity.has_ended", "not self.place or self.place != _place()", "False",
      f"{IDENTITY}elsewhere_nothing_is_known"),
    M("roll-calls-without-an-answer", "a rank that calls the roll answers nobody who calls it too",
      "runtime.membership:Membership.roll_call", "self.look()", "pass",
      "tests/runtime/test_membership.py::test_roll_calls_at_the_same_time"),
    M("victims-are-culprits", "of ranks that failed, the lowest is named, though it failed because of another one",
      "runtime.processes:RankPool._collect", "(failures[rank][0], rank)", "rank", f"{POOL}own_traceback"),
    M("nccl-fails-in-silence", "a call of NCCL that failed is taken for one that worked",
      "backends.nodes.nccl:Nccl._call", "code != _SUCCESS", "False",
      "tests/backends/test_nccl.py::test_calls_that_fail"),
    M("unknown-headers-are-changed", "headers of NCCL that nobody knows are changed where they fit",
      "jit.nccl_headers:Headers._changed", "times != 1", "times > 1",
      "tests/jit/test_nccl_headers.py::test_unknown_texts_are_refused"),
)

MODES = "tests/training/test_layer_modes.py::test_"

ABOVE = (
    M("parameters-of-inference-mode", "experts that are made in inference mode cannot be trained",
      "training.expert_module:RoutedExperts.__init__", "torch.inference_mode(False)", "torch.enable_grad()",
      f"{MODES}a_layer_made_in_inference_mode_trains"),
    M("main-grads-keep-a-graph", "main gradients keep the graph of the gradients that they sum",
      "training.main_grads:_add_to_main_grad", "local_part(parameter.grad.detach())", "local_part(parameter.grad)",
      f"{MODES}main_grads_have_no_graph"),
    M("main-grads-of-the-last-batch", "main gradients are those of the last micro-batch",
      "training.main_grads:_add_to_main_grad", "parameter.main_grad.add_(grad)", "parameter.main_grad.copy_(grad)",
      "tests/training/test_training_programs.py::test_micro_batches_equal_one_batch"),
    M("views-count-as-views", "a view counts for less than the memory that it keeps",
      "training.saved_activations:saved_tensors",
      "SavedTensor(name, tuple(tensor.shape), tensor.dtype, storage.nbytes())",
      "SavedTensor(name, tuple(tensor.shape), tensor.dtype, tensor.nbytes)",
      "tests/training/test_saved_activations.py::test_storages_are_counted_once_and_whole"),
    M("reads-without-a-stream", "a stream is not told of all tensors that a call on it reads",
      "compat.deep_ep.normal:NormalMode.dispatch",
      "(x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert)", "(topk_idx, topk_weights)",
      "tests/compat/deep_ep/test_streams.py::test_normal_dispatch"),
    M("old-routes-behind-the-tokens", "rows of a buffer behind the tokens keep the routes of an earlier call",
      "compat.deep_gemm.pre_dispatch:mega_moe_pre_dispatch_sm90", "buf_topk_idx[num_tokens:].fill_(-1)", "pass",
      "tests/compat/test_deep_gemm.py::test_pre_dispatch"),
)

MUTATIONS = CALLS + KEPT + PROCESSES + ABOVE
