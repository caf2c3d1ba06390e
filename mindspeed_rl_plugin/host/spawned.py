"""Main module of a spawned process in host mode (see `host.spawn`): host mode first, then the script."""

import os
import runpy

from mindspeed_rl_plugin import host
from mindspeed_rl_plugin.host.spawn import MAIN

host.activate_if_needed(announce=False)
# With multiprocessing's name, so that the script's `if __name__ == "__main__"` is false.
globals().update(runpy.run_path(os.environ[MAIN], run_name="__mp_main__"))
