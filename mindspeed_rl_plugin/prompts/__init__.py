"""Prompts: read from data, rendered to tokens, served in a seeded order from a cursor that can be saved."""

from mindspeed_rl_plugin.prompts.offers import Offers
from mindspeed_rl_plugin.prompts.pair_stream import Pair, PairRenderer, PairStream
from mindspeed_rl_plugin.prompts.prompt_stream import PromptStream
from mindspeed_rl_plugin.prompts.render import Renderer

__all__ = ["Offers", "Pair", "PairRenderer", "PairStream", "PromptStream", "Renderer"]
