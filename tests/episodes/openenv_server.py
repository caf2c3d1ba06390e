"""A server of OpenEnv's own package: `python openenv_server.py ENVIRONMENT PORT SESSIONS`."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed: str


class Echo(Environment):
    """Says what it hears; over at "bye"; fails at "fail". The reward is the number of letters."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, seed=None, greeting="hello", **_):
        self.count = 0
        return EchoObservation(echoed=f"{greeting} {seed}")

    def step(self, action):
        if action.message == "fail":
            raise RuntimeError("the wall fell")
        self.count += 1
        return EchoObservation(
            echoed=f"{self.count} {action.message}", reward=len(action.message), done=action.message == "bye"
        )

    @property
    def state(self):
        return State(step_count=self.count)


class MoveAction(Action):
    row: int
    column: int


class MoveObservation(Observation):
    board: list[list[int]]


class Board(Environment):
    """Two fields are needed; the observation is no text."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, **_):
        return MoveObservation(board=[[0, 0], [0, 0]])

    def step(self, action):
        board = [[int((i, j) == (action.row, action.column)) for j in range(2)] for i in range(2)]
        return MoveObservation(board=board, reward=0.5, done=True)

    @property
    def state(self):
        return State()


class Adder(MCPEnvironment):
    """Its actions are calls of a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("adder")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, **_):
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, **_):
        raise ValueError(f"unknown action {action}")

    @property
    def state(self):
        return State()


KINDS = {
    "echo": (Echo, EchoAction, EchoObservation),
    "board": (Board, MoveAction, MoveObservation),
    "adder": (Adder, Action, Observation),
}

if __name__ == "__main__":
    app = create_fastapi_app(*KINDS[sys.argv[1]], max_concurrent_envs=int(sys.argv[3]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
