"""The import line: `import mindspeed_rl_plugin.adaptor` attaches RL to a Megatron entry script.

If the script has `import mindspeed.megatron_adaptor`, put this line before it: MindSpeed's adaptor reads flags that RL
must remove first. The import adds the plugin's flags and its patches to Megatron; without `--rl-algorithm` on the
command line nothing changes. In a job with `--rl-generators` the last ranks generate inside this import, until the job
ends. If the runner or a patch from `patches/` has imported this module before, the line has no effect.
"""

from mindspeed_rl_plugin.checks import early

early.check_flags()  # before torch is imported, which takes seconds

from mindspeed_rl_plugin import host  # noqa: E402
from mindspeed_rl_plugin.launch.attach import attach  # noqa: E402
from mindspeed_rl_plugin.launch.generator_ranks import leave_if_generator  # noqa: E402

early.check_rows()
leave_if_generator()
host.activate_if_needed()
attach()
