"""`python -m mindspeed_rl_plugin replay`: runs log-probs, advantages and update of a recorded iteration again."""
