"""A tool of verifiers in a process of its own, for a model that multiplies; run by verifiers' plain chat."""

import verifiers.v1 as vf

__all__ = ["ProductTaskset"]


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b


class ProductData(vf.TaskData):
    answer: int


class ProductTask(vf.Task[ProductData]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.assistant_messages[-1].content == str(self.data.answer))


class ProductTaskset(vf.Taskset[ProductTask, vf.TasksetConfig]):
    def load(self):
        yield ProductTask(ProductData(prompt="17 x 23", answer=391), self.config.task)


if __name__ == "__main__":
    Calculator.run()
