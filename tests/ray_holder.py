"""Holds both CPUs of a Ray cluster of one node, at the address that it is given, and says so."""

import sys
import time

import ray


@ray.remote(num_cpus=2)
def hold():
    time.sleep(1000)


ray.init(address=sys.argv[1], logging_level="ERROR")
held = hold.remote()
while "CPU" in ray.available_resources():
    time.sleep(0.1)
print("[rl] held", flush=True)
time.sleep(1000)
