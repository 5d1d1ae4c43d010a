"""Experts of Hugging Face transformers' models, spread over ranks by tokenloom.

Importing this module registers ``"tokenloom"`` as an expert-parallel implementation. A model that is loaded with
``DistributedConfig(..., ep_implementation="tokenloom")`` then runs on it. It needs transformers 5.23 or newer, with
accelerate.
"""

from tokenloom.integrations.transformers.requirements import require_transformers

require_transformers()  # the modules below import names of it

from tokenloom.integrations.transformers.description import describe  # noqa: E402
from tokenloom.integrations.transformers.four_bits import keep_four_bits  # noqa: E402
from tokenloom.integrations.transformers.places import place_experts  # noqa: E402
from tokenloom.integrations.transformers.registration import register  # noqa: E402

__all__ = ["describe", "keep_four_bits", "place_experts", "register"]

register()
