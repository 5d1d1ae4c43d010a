"""Rules of compiled kernels on disk: what names them, how they are written and read, and who compiles them."""

from __future__ import annotations

from textwrap import indent

from tests.mutations.mutation import M

# fmt: off
JIT = "tests/jit/test_jit.py::test_"
SAFETY = "tests/jit/test_cache_safety.py::test_"
TURNS = "tests/jit/test_cache_turns.py::test_"
ENV = "tests/test_env.py::test_"
KEY, READ, WRITE = (f"jit.cache:{name}" for name in ("key_of", "_read", "_write"))
TAKES_A_TURN = """
folder.mkdir(mode=0o700, parents=True, exist_ok=True)
if _is_trusted(folder):
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    has_waited = _lock(file)
"""

KEYS = (
    M("headers-not-in-the-key", "a kernel is found again though a header that it includes has changed", KEY,
      "included_files(spec.path)", "None", f"{JIT}the_key_changes_with", f"{JIT}a_changed_header_is_compiled"),
    M("options-not-in-the-key", "a kernel is found again though the compiler's options have changed", KEY, "OPTIONS",
      "None", f"{JIT}the_key_changes_with"),
    M("arch-not-in-the-key", "a kernel of one architecture is found for another", KEY, "spec.arch", "None",
      f"{JIT}the_key_changes_with"),
    M("compiler-not-in-the-key", "a kernel of an earlier compiler is found again", KEY, "nvrtc_version()", "None",
      f"{JIT}the_key_changes_with"),
    M("version-not-in-the-key", "a kernel of an earlier version is found again", KEY, "__version__", "None",
      f"{JIT}the_key_changes_with"),
    M("prelude-not-in-the-key", "a kernel that was compiled with other headers of NCCL is found again", KEY,
      "[spec.prelude.digest, spec.prelude.in_memory]", "[spec.prelude.in_memory]", f"{JIT}the_key_changes_with",
      "tests/jit/test_nccl_headers.py"),
    M("code-of-other-headers", "code is kept under the name of headers that have changed meanwhile", "jit.cache:_make",
      "key_of(spec) == key", "True", f"{JIT}a_header_that_changes_meanwhile"),
)

FILES = (
    M("written-in-place", "an entry is written where others read it", WRITE,
      "handle, aside = tempfile.mkstemp(dir=folder, suffix=_ASIDE)",
      "aside = str(folder / (entry.key + _SUFFIX))\nhandle = os.open(aside, os.O_WRONLY | os.O_CREAT)",
      f"{JIT}an_unreadable_entry_is_replaced"),
    M("interrupted-writes-stay", "what an interrupted write has left stays on disk", WRITE,
      "Path(aside).unlink(missing_ok=True)", "pass", f"{JIT}an_interrupted_write_leaves_nothing"),
    M("unreadable-for-others", "what root has built in an image cannot be read by others", WRITE,
      "os.fchmod(file.fileno(), 0o644)", "pass", f"{SAFETY}what_is_made_is_trusted"),
    M("full-disks-end-a-run", "a kernel that cannot be kept cannot be used", WRITE,
      "contextlib.suppress(OSError)", "contextlib.suppress()", f"{JIT}a_folder_that_cannot_be_used_costs_time_only"),
    M("damage-is-loaded", "a file that was damaged is loaded as a kernel", READ,
      "said.decode() != hashlib.sha256(whole).hexdigest()", "False", f"{JIT}any_flipped_byte_is_seen"),
    M("damage-ends-a-run", "a file that is no entry ends the run", READ, "(OSError, ValueError, TypeError)",
      "OSError", f"{JIT}a_damaged_entry_is_compiled_again_and_replaced"),
    M("any-name-will-do", "an entry under the name of another one is taken for it", READ,
      "entry if path.name == entry.key + _SUFFIX else None", "entry",
      f"{JIT}a_damaged_entry_is_compiled_again_and_replaced"),
    M("partial-files-stay", "clearing leaves what killed writers have left", "jit.cache:clear",
      "[*folder.glob('*' + _SUFFIX), *folder.glob('*' + _ASIDE)]", "[*folder.glob('*' + _SUFFIX)]",
      f"{JIT}entries_and_clear"),
    M("folders-of-others", "kernels are read from a folder that others can write", READ,
      "not _is_trusted(path.parent)", "False", f"{SAFETY}a_folder_that_others_can_write_is_not_used"),
    M("files-of-others", "a kernel that others could have written is loaded", READ,
      "not _only_ours(os.fstat(file.fileno()))", "False",
      f"{SAFETY}a_file_that_others_can_write_is_compiled_again"),
    M("groups-are-trusted", "what its group may write counts as one's own", "jit.cache:_only_ours",
      "stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH", f"{SAFETY}a_folder_that_others_can_write_is_not_used"),
)

WAITS = (
    M("waiters-compile-too", "a process that has waited for another one compiles all the same", "jit.cache:get",
      "_read(folder / (key + _SUFFIX)) if has_waited else _make(spec, key, folder)", "_make(spec, key, folder)",
      f"{TURNS}who_has_waited_compiles_nothing"),
    M("one-turn-for-all-kernels", "processes compile different kernels one after the other", "jit.cache:_turn",
      "folder / (key + _ASIDE)", "folder / ('all' + _ASIDE)", f"{TURNS}who_has_waited_compiles_nothing"),
    M("children-hold-the-turn", "a process that was forked meanwhile keeps the others waiting", "jit.cache:_turn",
      "fcntl.flock(file, fcntl.LOCK_UN)", "pass", f"{TURNS}children_of_a_compiler_hold_nobody_up"),
    M("turns-leave-files", "the file of a turn stays in the cache", "jit.cache:_turn", "path.unlink()", "pass",
      f"{TURNS}each_kernel_is_compiled_once"),
    M("nobody-compiles", "a process that has waited in vain goes without a kernel", "jit.cache:get",
      "entry or _make(spec, key, folder)", "entry", f"{TURNS}without_room_all_compile_at_the_same_time"),
    M("disks-without-locks-end-a-run", "a disk that knows no locks ends the run", "jit.cache:_turn",
      f"with contextlib.suppress(OSError):\n{indent(TAKES_A_TURN, '    ')}", TAKES_A_TURN,
      f"{TURNS}a_disk_without_locks"),
)

FOLDERS = (
    M("empty-variables-name-folders", "a variable that is set to nothing names a folder", "env:cache_folder",
      'if xdg: return Path(xdg, "tokenloom")', 'if xdg is not None: return Path(xdg, "tokenloom")',
      f"{ENV}which_folder_wins"),
    M("home-as-it-is-written", "a file of settings makes a folder named ~", "env:cache_folder", "_at_home(chosen)",
      "Path(chosen)", f"{ENV}the_home_folder_in_our_variable"),
    M("temporary-folders-of-others", "a temporary folder that another user has made is used", "env:_is_ours",
      "found.st_uid == os.getuid()", "True", f"{ENV}another_user_s_folder_is_not_used"),
    M("temporary-folders-open-to-all", "a temporary folder that others could fill is used", "env:_is_ours",
      "not found.st_mode & 0o022", "True", f"{ENV}a_temporary_folder_that_others_could_fill_is_not_used"),
    M("no-folder-is-an-error", "kernels are not compiled where nothing can be written", "env:cache_folder",
      'return Path(os.devnull, "tokenloom")', "raise", f"{ENV}no_home_is_no_obstacle"),
)

MUTATIONS = KEYS + FILES + WAITS + FOLDERS
