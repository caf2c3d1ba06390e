"""What an agents' process is to its bridge, without agents: rollouts follow a script that their row holds.

The first message of the script is said when the rollout begins, each further one upon a turn of the model.
"""

import os
import time

from mindspeed_rl_plugin.workers.child import Parent
from mindspeed_rl_plugin.workers.keeper import keep


def main(connection, lifeline):
    keep(connection, lifeline, 1.0)
    parent = Parent(connection, None)
    parent.send((None, "there is no such environment") if parent.receive() == "unknown" else ("", None))
    scripts, heard = {}, {}
    while True:
        call, number, *arguments = parent.receive()
        if call == "begin":
            scripts[number] = arguments[0]["script"]
        if call == "end":
            if scripts[number] != ["stuck"]:
                ended = {"ended": True, "heard": heard.get(number, [])}
                last = next((line for line in scripts[number] if "ended" in line), ended)
                parent.send({"number": number, "seconds": 0.0, **last})
            continue
        if call == "answer" and arguments[0] == "speak":
            heard.setdefault(number, []).append(arguments[1])
        script = scripts[number]
        line = script.pop(0) if script and script != ["stuck"] else "silence"
        if line == "die":
            os._exit(3)
        if line == "silence":
            continue
        if line == "echo":
            said = {"role": "user", "content": str([call, *arguments])}
            line = {"request": {"calls": [9], "messages": [said]}}
        for one in line if isinstance(line, list) else [line]:
            time.sleep(one.pop("sleep", 0))
            parent.send({"number": number, "seconds": 0.25, **one})
            time.sleep(0.05)
