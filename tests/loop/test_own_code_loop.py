"""A job whose tokenizer has code of its own."""

import pytest
from own_tokenizer import write

ASYNC = "--rl-schedule async --rl-generators 1 --rl-async-order strict --rl-correction truncate --rl-max-staleness 0"
NUMBERS = ("loss", "grad_norm", "reward/mean", "response/length_mean", "entropy")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["", ASYNC])
def test_a_tokenizer_of_its_own_code_trains_as_the_one_with_the_same_tokens(job, schedule, tmp_path, monkeypatch):
    """In trainers, in the engine, which needs it for --rl-stop, and in one apart. Without the flag it is refused."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    flags = ["--train-iters", "2", "--rl-stop", "7", *schedule.split()]
    own = ["--rl-tokenizer", str(write(tmp_path / "own"))]
    plain = job(*flags, name="plain").run()
    result = job(*flags, *own, "--rl-trust-remote-code", name="own").run()
    one, other = ([[line[name] for name in NUMBERS] for line in run.metrics] for run in (plain, result))
    assert one == other and len(one) == 2
    if not schedule:
        result = job(*flags, *own, name="refused").fail(120)
        assert "code of its own (own_tokens.OwnTokenizer), which is not run" in result.log
