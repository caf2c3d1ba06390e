"""What engines read of a job, and what they refuse of it."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.generators import serving
from mindspeed_rl_plugin.generators.description import Description
from mindspeed_rl_plugin.prompts.tokenizer import vocabulary_digest
from mindspeed_rl_plugin.rows import Sampling

OPTIONS = VllmOptions({"model_type": "qwen2", "eos_token_id": [1, 2]}, 24, eos_token_ids=(1, 2))
JOB = Description(OPTIONS, Sampling(max_tokens=8, stop=("\n",)), 7, "keep", False, 60.0)


def tokenizer(folder, **vocabulary: int) -> str:
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


def test_it_comes_back_from_text():
    assert Description.from_json(JOB.to_json()) == JOB


def test_another_version_of_the_package_and_a_job_without_engines_are_refused():
    with pytest.raises(ValueError, match=r"runs mindspeed_rl_plugin 0\.0\.1, this process .*; install the job's"):
        Description.from_json(json.dumps(json.loads(JOB.to_json()) | {"version": "0.0.1", "new": 3}))
    with pytest.raises(ValueError, match="takes no engines: start it with --rl-schedule async"):
        Description.from_json("")


def test_a_tokenizer_with_other_tokens_is_refused(tmp_path):
    mine, theirs = tokenizer(tmp_path / "mine", a=0, b=1), tokenizer(tmp_path / "theirs", a=1, b=0)
    job = replace(JOB, vocabulary=vocabulary_digest(mine))
    job.check_tokenizer(tokenizer(tmp_path / "copy", b=1, a=0))
    with pytest.raises(ValueError, match=r"theirs has other tokens .* give --tokenizer a copy of the job's"):
        job.check_tokenizer(theirs)
    with pytest.raises(ValueError, match="'/nowhere': there is no such directory here; give --tokenizer a copy of"):
        job.check_tokenizer("/nowhere")
    JOB.check_tokenizer(None)


def test_a_process_that_asks_a_server_needs_the_jobs_tokenizer_for_episodes_only(tmp_path):
    mine, theirs = tokenizer(tmp_path / "mine", a=0, b=1), tokenizer(tmp_path / "theirs", a=1, b=0)
    job = replace(JOB, vocabulary=vocabulary_digest(mine), tokenizer="/of/the/job")

    def here(job, given):
        return serving.tokenizer_here(job, replace(OPTIONS, tokenizer=given), "http://b:1", given)

    assert here(job, mine) == mine and here(JOB, None) is None
    for of, given, why in (
        (job, None, "'/of/the/job': there is no such directory here; give --tokenizer"),
        (job, theirs, "theirs has other tokens"),
        (JOB, "mine", "--tokenizer mine: the server at http://b:1 has its own .* leave the option out"),
    ):
        with pytest.raises(ValueError, match=why):
            here(of, given)
