"""Rewards: graders by name or from a user's file, in worker processes that can be killed.

This package imports neither torch nor a grader's libraries, so that workers, which import it, start fast.
"""

from mindspeed_rl_plugin.reward.items import Grade, GradeItem, RewardError, solved
from mindspeed_rl_plugin.reward.reward_pool import RewardPool

__all__ = ["Grade", "GradeItem", "RewardError", "RewardPool", "solved"]
