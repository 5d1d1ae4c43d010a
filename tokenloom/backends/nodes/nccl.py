"""NCCL's host calls for windows and device communicators, by ctypes on the libnccl that torch has loaded.

Nothing is loaded by an import. Structs whose layout changes between versions stay bytes: ``jit/nccl_layout.py`` fills
and reads them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from tokenloom.errors import BackendUnavailable, InvalidArgument, TokenloomError
from tokenloom.jit.nccl_headers import Headers, check_versions, find_headers

WINDOW_ALIGNMENT = 4096
"""Bytes. Windows begin and end at multiples of it."""

_SUCCESS = 0
_MAPS = Path("/proc/self/maps")

_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(ctypes.c_void_p)
_INT_OUT = ctypes.POINTER(ctypes.c_int)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (_INT_OUT,),
    "ncclMemAlloc": (_OUT, ctypes.c_size_t),
    "ncclMemFree": (_POINTER,),
    "ncclCommWindowRegister": (_POINTER, _POINTER, ctypes.c_size_t, _OUT, ctypes.c_int),
    "ncclCommWindowDeregister": (_POINTER, _POINTER),
    "ncclDevCommCreate": (_POINTER, _POINTER, _POINTER),
    "ncclDevCommDestroy": (_POINTER, _POINTER),
    "ncclCommAbort": (_POINTER,),
}


class NcclError(TokenloomError, RuntimeError):
    """A call of NCCL failed.

    Attributes:
        call: its name.
        code: what it returned, a ncclResult_t.
    """

    def __init__(self, call: str, code: int, text: str, detail: str) -> None:
        self.call = call
        self.code = code
        super().__init__(
            f"{call} returned {code} ({text})" + (f": {detail}" if detail else "") + "; NCCL_DEBUG=INFO says more"
        )


class Nccl:
    """The calls. Communicators, windows and memory are addresses; each call raises :class:`NcclError` if it fails.

    Args:
        path: of libnccl.

    Raises:
        BackendUnavailable: it does not load, or is too old to have all of the calls.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library: Any = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendUnavailable(f"{path} does not load: {error}; install nvidia-nccl-cu13 again") from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise BackendUnavailable(f"{path} has no {name}; update NCCL to 2.28.9 or newer")
            function.argtypes, function.restype = arguments, ctypes.c_int
        for name, argument in (("ncclGetErrorString", ctypes.c_int), ("ncclGetLastError", _POINTER)):
            function = getattr(self._library, name)
            function.argtypes, function.restype = (argument,), ctypes.c_char_p

    def version(self) -> tuple[int, int, int]:
        """Of the library, say (2, 28, 9)."""
        code = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(code))
        return code.value // 10000, code.value // 100 % 100, code.value % 100

    def allocate(self, num_bytes: int) -> int:
        """Address of device memory that can be a window."""
        address = ctypes.c_void_p()
        self._call("ncclMemAlloc", ctypes.byref(address), num_bytes)
        if not address.value:
            raise NcclError("ncclMemAlloc", _SUCCESS, "success, but no memory", "")
        return address.value

    def free(self, address: int) -> None:
        """Give memory of :meth:`allocate` back."""
        self._call("ncclMemFree", address)

    def register_window(self, comm: int, address: int, num_bytes: int) -> int:
        """Make memory a window of a communicator. Collective: its ranks register windows in the same order.

        Args:
            comm: the communicator.
            address: of the memory, a multiple of 4096.
            num_bytes: a multiple of 4096, the same on all ranks.

        Returns:
            The window, which kernels take.

        Raises:
            InvalidArgument: the memory does not begin or end at a multiple of 4096.
            BackendUnavailable: this communicator has no symmetric memory.
        """
        if address % WINDOW_ALIGNMENT or num_bytes % WINDOW_ALIGNMENT or num_bytes <= 0:
            raise InvalidArgument(
                f"a window of {num_bytes} bytes at {address:#x}, expected multiples of {WINDOW_ALIGNMENT} for both"
            )
        window = ctypes.c_void_p()
        self._call("ncclCommWindowRegister", comm, address, num_bytes, ctypes.byref(window), 0)
        if not window.value:
            raise BackendUnavailable(
                "NCCL made no window: this communicator has no symmetric memory; NCCL_CUMEM_ENABLE must not be 0, and "
                "GPUs of a node must reach each other's memory"
            )
        return window.value

    def deregister_window(self, comm: int, window: int) -> None:
        """Let a window go. Its memory stays."""
        self._call("ncclCommWindowDeregister", comm, window)

    def create_device_comm(self, comm: int, requirements: bytes, num_bytes: int) -> bytes:
        """Make what kernels need of a communicator. Collective.

        Args:
            comm: the communicator.
            requirements: a ``ncclDevCommRequirements``, see ``Layout.requirements``.
            num_bytes: size of a ``ncclDevComm``, see ``Layout.types``.

        Returns:
            The ``ncclDevComm``, which kernels take by value.
        """
        request = ctypes.create_string_buffer(requirements, len(requirements))
        device_comm = ctypes.create_string_buffer(num_bytes)
        self._call("ncclDevCommCreate", comm, request, device_comm)
        return device_comm.raw

    def destroy_device_comm(self, comm: int, device_comm: bytes) -> None:
        """Give back what :meth:`create_device_comm` made. Collective."""
        self._call("ncclDevCommDestroy", comm, ctypes.create_string_buffer(device_comm, len(device_comm)))

    def abort(self, comm: int) -> None:
        """End a communicator whose ranks may be gone; it waits for none of them."""
        self._call("ncclCommAbort", comm)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            raise NcclError(name, code, *self._words(code))

    def _words(self, code: int) -> tuple[str, str]:
        text = self._library.ncclGetErrorString(code) or b""
        detail = self._library.ncclGetLastError(None) or b""
        return text.decode(errors="replace"), detail.decode(errors="replace").strip()


def loaded_library() -> Path:
    """The libnccl that this process has loaded, which torch does when it is built for it.

    Raises:
        BackendUnavailable: there is none, or more than one, so that nobody knows whose communicators these are.
    """
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BackendUnavailable(f"{_MAPS}: {error.strerror}; NCCL's library cannot be found") from error
    found = sorted({fields[5] for fields in (line.split(maxsplit=5) for line in lines) if _is_nccl(fields)})
    if len(found) != 1:
        what = f"several: {', '.join(found)}" if found else "none: this torch does not use it"
        raise BackendUnavailable(f"expected one loaded libnccl, found {what}")
    return Path(found[0])


def _is_nccl(fields: list[str]) -> bool:
    return len(fields) == 6 and Path(fields[5]).name.startswith("libnccl.so")


def library_with_headers() -> tuple[Nccl, Headers]:
    """The library that torch has loaded, and headers of the same version.

    Raises:
        BackendUnavailable: there is no such library, none of its headers, or these are of another version.
    """
    path = loaded_library()
    headers, library = find_headers(path), Nccl(path)
    check_versions(headers, library.version())
    return library, headers
