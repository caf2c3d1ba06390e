"""Guess the number, an environment of verifiers: a user who says higher or lower, and a reward for few guesses.

Its harness asks for the turns in this process, so that a rollout starts no program.
"""

import re

import httpx
import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessHarness", "GuessTaskset"]


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        messages = [{"role": "system", "content": system}] if system else []
        messages += [message.model_dump(exclude_none=True) for message in prompt]
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)


class GuessData(vf.TaskData):
    answer: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def few(self, trace) -> float:
        guesses = [message.content or "" for message in trace.assistant_messages]
        if guesses and guesses[-1] == str(self.data.answer):
            return 1.0 / len(guesses)
        return len("".join(guesses)) // 4 % 3 / 10  # a model that was never trained has something to learn from


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guess = re.fullmatch("[0-9]+", segment.last_reply)
                if guess and int(guess[0]) == task.data.answer:
                    break
                word = "no number" if guess is None else "higher" if int(guess[0]) < task.data.answer else "lower"
                segment = await interaction.turn(word)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for number in (7, 22, 13):
            yield GuessTask(GuessData(prompt="Guess a number from 0 to 31.", answer=number), self.config.task)
