"""``deep_ep.utils.event``."""

from tokenloom.compat.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
