"""vLLM's own OpenAI server, with the changes that engines of this project have on a CPU.

    python benchmarks/training/vllm_server.py --model DIR ...   # flags of `vllm serve`

vLLM spawns the engine's process, which imports this file again.
"""

import runpy

from mindspeed_rl_plugin.host import vllm_live

vllm_live.apply()
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
