"""DeepEP's names, served by tokenloom: see ``tokenloom.compat.deep_ep``."""

from tokenloom.compat.installation import fill, warn_of_others

warn_of_others()
fill(__name__)
