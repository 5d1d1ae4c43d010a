"""How a program that imports ``deep_ep`` finds tokenloom's. Nothing heavy is imported before it does."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module, metadata, util
from pathlib import Path

SERVED = "deep_ep"
"""Name of the module that is served."""
SUBMODULES = ("hybrid_ep_buffer", "utils", "utils.envs", "utils.event", "utils.math", "utils.testing")
"""Those that clients import by their own names."""
PATH = Path(__file__).parent / "deep_ep_path"
"""The folder to put on PYTHONPATH. It holds nothing but the module."""
OWN_DISTRIBUTION = "tokenloom-deep-ep"
MARK = "__served_by_tokenloom__"


def install(*, force: bool = False) -> None:
    """Make ``import deep_ep`` find tokenloom's module in this process, say in a test or a notebook.

    Call it before anything imports ``deep_ep``. Processes that this one starts do not inherit it: for those put
    ``python -m tokenloom deep-ep-path`` on PYTHONPATH, or install the distribution ``tokenloom-deep-ep``.

    Args:
        force: replace another ``deep_ep`` that was imported already. Who imported it keeps what it has.

    Raises:
        RuntimeError: another ``deep_ep`` was imported already, and ``force`` is False.
    """
    loaded = sys.modules.get(SERVED)
    if loaded is not None and hasattr(loaded, MARK):
        return
    if loaded is not None and not force:
        where = getattr(loaded, "__file__", None) or "an unknown place"
        raise RuntimeError(f"deep_ep was imported from {where} already; call install() before, or with force=True")
    for name in [each for each in sys.modules if each == SERVED or each.startswith(f"{SERVED}.")]:
        del sys.modules[name]
    location = PATH / SERVED / "__init__.py"
    spec = util.spec_from_file_location(SERVED, location, submodule_search_locations=[str(location.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[SERVED] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(SERVED, None)
        raise


def fill(name: str) -> None:
    """Give the module that is being imported under this name all that tokenloom serves, and its submodules.

    Both names are one module each: ``deep_ep.utils`` and ``tokenloom.compat.deep_ep.utils`` have the same classes.
    """
    module, served = sys.modules[name], import_module(f"tokenloom.compat.{SERVED}")
    for submodule in SUBMODULES:
        found = import_module(f"{served.__name__}.{submodule}")
        sys.modules[f"{name}.{submodule}"] = found
        if "." not in submodule:
            setattr(module, submodule, found)
    for public in served.__all__:
        setattr(module, public, getattr(served, public))
    vars(module)["__all__"] = list(served.__all__)
    vars(module)["__version__"] = served.__version__
    vars(module)[MARK] = True


def warn_of_others() -> None:
    """Warn if another distribution has installed a module ``deep_ep`` too: one has overwritten files of the other."""
    others = [name for name in _claimants() if name != OWN_DISTRIBUTION]
    if others:
        warnings.warn(
            f"deep_ep is claimed by {', '.join(others)} and by {OWN_DISTRIBUTION}, which share its files; uninstall "
            f"all of them, then install the one that you mean",
            ImportWarning,
            stacklevel=4,
        )


def _claimants() -> list[str]:
    """Distributions that say they have a top-level module ``deep_ep``."""
    found = set()
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        listed = (distribution.read_text("top_level.txt") or "").split()
        if SERVED in listed or (not listed and name.endswith(SERVED.replace("_", "-"))):
            found.add(name)
    return sorted(found)
