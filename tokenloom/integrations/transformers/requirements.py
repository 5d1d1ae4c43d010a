"""Whether transformers is here, and new enough."""

from __future__ import annotations

from importlib import import_module

NEEDED = "transformers>=5.23"


def require_transformers() -> None:
    """Check that transformers has a registry of expert-parallel implementations.

    Raises:
        ImportError: it is missing, or older than 5.23. The message says what to install.
    """
    cure = f"tokenloom.integrations.transformers needs it: pip install '{NEEDED}' accelerate"
    try:
        version = import_module("transformers").__version__
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"transformers is not installed; {cure}") from error
    try:
        found = hasattr(import_module("transformers.distributed.expert_parallel"), "EPImplementationInterface")
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ImportError(f"transformers {version} has no registry of expert-parallel implementations; {cure}")
