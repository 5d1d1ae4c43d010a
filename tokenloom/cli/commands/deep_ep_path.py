"""``tokenloom deep-ep-path``."""

from __future__ import annotations


def deep_ep_path() -> None:
    """Print the folder to put on PYTHONPATH, so that programs written for deep_ep run on tokenloom."""
    from tokenloom.compat.installation import PATH

    print(PATH)
