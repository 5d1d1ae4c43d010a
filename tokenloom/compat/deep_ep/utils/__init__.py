"""``deep_ep.utils``: events, and what upstream's tests import."""

from tokenloom.compat.deep_ep.events import EventHandle, EventOverlap
from tokenloom.compat.deep_ep.utils import envs, event, math, testing

__all__ = ["EventHandle", "EventOverlap", "envs", "event", "math", "testing"]
