"""DeepEP's names, served by tokenloom: see ``tokenloom.compat.deep_ep``."""

from tokenloom.compat.installation import fill

fill(__name__)
