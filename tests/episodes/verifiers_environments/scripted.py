"""An environment of verifiers whose user says what its data hold, and which has the fault that they name."""

import asyncio
import os
import subprocess
import time

import verifiers.v1 as vf
from guess_number import GuessHarness

__all__ = ["GuessHarness", "ScriptedEnv", "ScriptedTaskset"]


class ScriptedData(vf.TaskData):
    says: list[str] = []
    fault: str = ""


class ScriptedTask(vf.Task[ScriptedData]):
    @vf.reward
    async def letters(self, trace) -> float:
        if self.data.fault == "nan":
            return float("nan")
        if self.data.fault == "cut":
            return float(trace.is_truncated)
        return float(sum(len(message.content or "") for message in trace.assistant_messages))


class ScriptedEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class ScriptedEnv(vf.Env[ScriptedEnvConfig]):
    async def run(self, task, agents):
        fault = task.data.fault
        async with agents.player.interaction(task) as interaction:
            if fault == "early":
                return
            segment = await interaction.turn()
            if fault == "raise":
                raise RuntimeError("the board is gone")
            if fault == "cancel":
                raise asyncio.CancelledError
            if fault == "hang":
                await asyncio.sleep(600)
            if fault == "block":
                time.sleep(600)
            if fault == "exit":
                os._exit(5)
            if fault == "spawn":
                child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                await interaction.turn(str(child.pid))
            if fault == "agents":
                async with agents.other.interaction(task) as another:
                    await another.turn()
            for text in task.data.says:
                if segment.terminated:
                    return
                segment = await interaction.turn(text)


class ScriptedTaskset(vf.Taskset[ScriptedTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield ScriptedTask(ScriptedData(prompt="?"), self.config.task)
