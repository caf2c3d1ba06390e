"""Graders of tests in which an evaluation ends after the rollouts that follow it."""

import time


def grade(response, answer):
    if answer == "late":
        time.sleep(10)
    return len(response) % 3
